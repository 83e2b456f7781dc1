"""Masks that order the tokens and masks that do not, and what that means, in loops. Nothing of the library is used."""

import pytest
import torch

N = 13
Q, K = torch.arange(N)[:, None], torch.arange(N)
DOCUMENT = K // 5
SHUFFLED = torch.randperm(N, generator=torch.Generator().manual_seed(1))

ORDERED = {
    "lower triangle": K <= Q,
    "upper triangle": K >= Q,
    "strict triangle": K < Q,
    "block-causal": K // 4 <= Q // 4,
    "prefix": (K <= Q) | (K < 5),
    "causal packing": (DOCUMENT[:, None] == DOCUMENT) & (K <= Q),
    "window (6, 2)": (K - Q <= 2) & (Q - K <= 6),
    "window (0, 3)": (K - Q <= 3) & (Q - K <= 0),
    "one pair": (Q == K) | ((Q == 11) & (K == 2)),
    "triangle, padded left": (K <= Q) & (K >= 4),
    "triangle, padded right": (K <= Q) & (K < 9),
}
UNORDERED = {
    "everything": torch.ones(N, N, dtype=torch.bool),
    "nothing": torch.zeros(N, N, dtype=torch.bool),
    "diagonal": Q == K,
    "window": (Q - K).abs() <= 3,
    "packed documents": DOCUMENT[:, None] == DOCUMENT,
    "global tokens": (Q < 2) | (K < 2) | (Q == K),
    "random": torch.rand(N, N, generator=torch.Generator().manual_seed(2)) < 0.3,
    "keys padded right": (K < 9).expand(N, N).contiguous(),
    "keys padded left": (K >= 4).expand(N, N).contiguous(),
    "window, keys padded right": ((Q - K).abs() <= 3) & (K < 9),
    "queries padded": (Q < 9).expand(N, N).contiguous(),
    "a triangle in another order": (K <= Q)[SHUFFLED][:, SHUFFLED],
}
REFUSED = pytest.raises(NotImplementedError, match=r"attn_mask must not order the tokens.*column sums run over all")


def by_definition(matrix, queries=None, keys=None):
    """Whether one matrix orders the tokens, in loops."""
    n = len(matrix)
    entry = [
        [bool(matrix[i][j] and (queries is None or queries[i]) and (keys is None or keys[j])) for j in range(n)]
        for i in range(n)
    ]
    left = [i for i in range(n) if any(entry[i]) and any(entry[j][i] for j in range(n))]
    backward = any(entry[i][j] and not entry[j][i] for i in left for j in left if j < i)
    forward = any(entry[i][j] and not entry[j][i] for i in left for j in left if j > i)
    return backward != forward


def as_bias(mask, lowest=-torch.inf):
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)
