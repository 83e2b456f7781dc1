"""What the kernels write beside their results: vectors for the backward pass, and whether each matrix is safe.

They take four tensors, or one: to allocate and save four takes longer than the kernels do for small matrices.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class StateSizes(NamedTuple):
    """The sizes of the scalings u (…, rows, n), the column sums s (…, cols, m) and the row maxima r (…, maxima)."""

    rows: int
    n: int
    cols: int
    m: int
    maxima: int

    def shapes(self, lead: Sequence[int]) -> list[tuple[int, ...]]:
        return [(*lead, self.rows, self.n), (*lead, self.cols, self.m), (*lead, self.maxima)]

    def unpack(self, state: Tensor, lead: Sequence[int]) -> list[Tensor]:
        """u, s, r and safe as views of the one tensor that holds them."""
        parts, start = [], 0
        for shape in self.shapes(lead):
            parts.append(state[start : start + prod(shape)].view(shape))
            start += prod(shape)
        return [*parts, flags(state, lead)]


@lru_cache(maxsize=1024)
def state_sizes(n: int, m: int, n_iters: int) -> StateSizes:
    return StateSizes((n_iters + 1) // 2, n, n_iters // 2, m, n)


@lru_cache(maxsize=1024)
def packed_state(sizes: StateSizes, matrices: int) -> tuple[int, dict[str, int]]:
    """The length of the one tensor that holds a state, and where its parts begin; `safe` uses its first bytes."""
    s = matrices * sizes.rows * sizes.n
    r = s + matrices * sizes.cols * sizes.m
    safe = r + matrices * sizes.maxima
    return safe + matrices, {"u": 0, "s": s, "r": r, "safe": safe}


def flags(memory: Tensor, lead: Sequence[int]) -> Tensor:
    """`safe` (…), the last part of a packed tensor."""
    count = prod(lead)
    return memory[-count:].view(torch.bool)[:count].view(tuple(lead))
