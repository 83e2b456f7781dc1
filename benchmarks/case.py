"""What is computed: the shape of a case, its fixed inputs, and large inputs whose answer a small problem knows."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGEST_DIRECT = 1024


@dataclass(frozen=True)
class Case:
    """Float32 attention on (batch, heads, n, d); `padding` is the share of masked tokens, None for no mask."""

    batch: int
    heads: int
    n: int
    d: int = 64
    n_iters: int = 3
    backward: bool = True
    std: float = 1.0
    padding: float | None = None

    @property
    def label(self) -> str:
        return f"{self.batch * self.heads} × {self.n}"

    @property
    def entries(self) -> int:
        """How many scores there are."""
        return self.batch * self.heads * self.n**2


@dataclass(frozen=True)
class Inputs:
    """Tokens (batch, heads, n, d), the incoming gradient, and which tokens are real (batch, n)."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor | None
    real: Tensor | None

    def at(self, index: Tensor) -> "Inputs":
        """The inputs whose token i is the token `index[i]` of these."""
        query, key, value = (x[..., index, :].contiguous() for x in (self.query, self.key, self.value))
        grad = None if self.grad is None else self.grad[..., index, :].contiguous()
        real = None if self.real is None else self.real[:, index].contiguous()
        return Inputs(replace(self.case, n=len(index)), query, key, value, grad, real)


def draw(case: Case, seed: int = 0) -> Inputs:
    """Standard normal tokens, queries scaled so that the scores have the case's standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.heads, case.n, case.d)
    query, key, value, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    real = None
    if case.padding is not None:
        real = torch.ones(case.batch, case.n, dtype=torch.bool)
        real[:, round(case.n * (1 - case.padding)) :] = False
    return Inputs(case, query * case.std, key, value, grad if case.backward else None, real)


def with_known_answer(case: Case) -> tuple[Inputs, Inputs, Tensor]:
    """Inputs of the case, inputs small enough for the reference, and the index that leads from these to those.

    Tokens that occur c times each share what one of them would get: every output and every gradient of the large
    problem is that of the small one, exactly, at any number of iterations.
    """
    small = next(size for size in range(min(case.n, LARGEST_DIRECT), 0, -1) if case.n % size == 0)
    base = draw(replace(case, n=small))
    if small == case.n:
        return base, base, torch.arange(small)
    shuffle = torch.randperm(case.n, generator=torch.Generator().manual_seed(1))
    index = torch.arange(small).repeat(case.n // small)[shuffle]
    return base.at(index), base, index
