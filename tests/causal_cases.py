"""Masks under which queries come one after the other, and calls of causal attention by every backend that serves."""

import pytest
import torch

from sinkformers import backend_for, sinkhorn_attention
from sinkformers.attention.causal import BACKENDS as TABLE

N = 13
Q, K = torch.arange(N)[:, None], torch.arange(N)
DOCUMENT = (K >= 4).long() + (K >= 9)
BACKENDS = [name for name in TABLE.by_name if name != "triton"]  # which has tests of its own, in its interpreter
N_ITERS = [1, 3, 5, 7]

MASKS = {
    "triangle": K <= Q,
    "padded left": (K <= Q) & (K >= 4) & (Q >= 4),
    "padded right": (K <= Q) & (K < 9) & (Q < 9),
    "window": (K <= Q) & (Q - K < 4),
    "packed documents": (DOCUMENT[:, None] == DOCUMENT) & (K <= Q),
    "prefix-LM": (K <= Q) | (K < 5),
    "block-causal": K // 4 <= Q // 4,
    "limited lookahead": K <= Q + 2,
    "a query masked alone": (K <= Q) & (Q != 5),
    "every key": torch.ones(N, N, dtype=torch.bool),
    "cross-attention": torch.ones(N, 7, dtype=torch.bool),
    "cross-attention, padded": (torch.arange(7) < 5).expand(N, 7),
    "more keys": torch.ones(5, N, dtype=torch.bool).tril(N - 5),
    "random, an empty row and column": (torch.rand(N, 11, generator=torch.Generator().manual_seed(3)) < 0.4)
    & (torch.arange(N) != 6)[:, None]
    & (torch.arange(11) != 2),
}
SQUARE = [name for name, mask in MASKS.items() if mask.shape == (N, N)]


def tokens(mask, *lead, d=5, e=3, dtype=torch.float64):
    """Query, key and value for a mask, leaves that require gradients."""
    n, m = mask.shape[-2:]
    shapes = ((*lead, n, d), (*lead, m, d), (*lead, m, e))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def scores_of(query, key, scale=None):
    """The scores in float64 of dot products."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return scale * query.detach().double() @ key.detach().double().mT


def attend(*args, backend="auto", **kwargs):
    """Causal attention by a backend; the test is skipped where that says that it does not serve such calls."""
    kwargs = {"causal": None if kwargs.get("is_causal") else "streaming", **kwargs}
    try:
        backend_for(*args, backend=backend, **kwargs)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    return sinkhorn_attention(*args, backend=backend, **kwargs)


def causal_gradients(out, inputs, *, d_out=None):
    """The gradients of a sum with random weights, the same for the same shape."""
    if d_out is None:
        generator = torch.Generator().manual_seed(5)
        d_out = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.dtype)
    return torch.autograd.grad(out, inputs, d_out)
