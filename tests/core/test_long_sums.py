"""Columns of 100,003 like terms in float32: added one after the other they lose nearly a thousandth of their sum.

Blocks have some 1,000 rows, so that a term is in about 1,000 additions within its block, then in 98 over the
blocks; each rounds by eps/2 at most, always the same way where terms are alike.
"""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_attention
from sinkformers.kernels import native

N = 100_003
BOUND = (1024 + 98) / 2 * torch.finfo(torch.float32).eps


def operator(scores, backend):
    return sinkhorn(scores, n_iters=2, backend=backend)


def attention(scores, backend):
    """The values are the identity, so that the output is the weights; the bias is all of the scores."""
    n, m = scores.shape
    return sinkhorn_attention(
        torch.zeros(n, 4), torch.zeros(m, 4), torch.eye(m), attn_mask=scores, n_iters=2, backend=backend
    )


BACKENDS = [
    "torch",
    pytest.param(
        "native", marks=pytest.mark.skipif(bool(native.missing()), reason="the native kernels were not built")
    ),
]


@pytest.mark.parametrize("m", [3, 17, 24])  # beside whole vectors, both, and within them
@pytest.mark.parametrize("weigh", [operator, attention])
@pytest.mark.parametrize("backend", BACKENDS)
def test_long_columns(backend, weigh, m):
    """Scores are all alike, so a weight is 1/m."""
    assert_close(weigh(torch.zeros(N, m), backend), torch.full((N, m), 1 / m), rtol=BOUND, atol=0)


@pytest.mark.parametrize("m", [3, 17, 24])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_long_columns(backend, m):
    """After a column step column sums are constant, and so is any function of them: its gradient is the difference of
    two equal numbers, for the column and, through the row step before, for the mean over the columns."""
    scores = torch.zeros(N, m, requires_grad=True)
    d_weights = torch.arange(1.0, m + 1).expand(N, m)
    (grad,) = torch.autograd.grad(operator(scores, backend), scores, d_weights)
    assert (grad.abs() <= 2 * BOUND * (d_weights + d_weights.mean(-1, keepdim=True)) / m).all()
