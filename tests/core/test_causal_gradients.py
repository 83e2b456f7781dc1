"""Gradients of `causal_sinkhorn`: finite differences, and no dependence on what comes later."""

import pytest
import torch

from sinkformers import causal_sinkhorn
from tests import causal_oracle as oracle
from tests.causal_cases import MASKS, N_ITERS, SQUARE

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CASES = [("streaming", name) for name in MASKS] + [("prefix", name) for name in SQUARE]


@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("name", ["triangle", "padded left", "window", "prefix-LM"])
@pytest.mark.parametrize("definition", oracle.DEFINITIONS)
def test_gradcheck(definition, name, n_iters):
    mask = MASKS[name][2:7, 2:7]
    scores = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.4, 0.9], dtype=torch.float64, requires_grad=True)

    def weights(scores, tau):
        return causal_sinkhorn(scores, n_iters=n_iters, tau=tau, mask=mask, definition=definition)

    assert torch.autograd.gradcheck(weights, (scores, tau), fast_mode=n_iters > 3)


def may_depend(mask, definition):
    """Which scores (k, l) the weights of row i may depend on, (i, k, l)."""
    n, m = mask.shape
    allowed = torch.zeros(n, n, m, dtype=torch.bool)
    for i in range(n):
        if definition == "streaming":  # the visible scores of this row and those before
            allowed[i, : i + 1] = mask[: i + 1]
        else:  # the tokens that it sees, and itself
            queries = mask[i].clone()
            queries[i] = True
            queries &= mask.any(-1)
            allowed[i] = queries[:, None] & mask[i]
    return allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("definition", "name"), CASES)
def test_no_weight_depends_on_later_scores(definition, name, dtype):
    mask = MASKS[name]
    scores = (2 * torch.randn(mask.shape)).to(dtype).requires_grad_()
    weights = causal_sinkhorn(scores, n_iters=5, tau=0.8, mask=mask, definition=definition)
    factors = torch.randn(mask.shape).to(dtype)
    rows = (weights * factors).sum(-1)
    found = torch.stack([torch.autograd.grad(row, scores, retain_graph=True)[0] for row in rows])
    allowed = may_depend(mask, definition)
    assert found.isfinite().all()
    assert not found[~allowed].any()
    assert found[allowed].count_nonzero() > allowed.sum() / 4  # it does depend on the others


@pytest.mark.parametrize("definition", oracle.DEFINITIONS)
def test_later_scores_change_no_bit(definition):
    scores = torch.randn(3, 17, 17)
    first = causal_sinkhorn(scores[:, :9, :9], n_iters=5, definition=definition)
    scores[:, 9:] = 50 * torch.randn(3, 8, 17)
    again = causal_sinkhorn(scores, n_iters=5, definition=definition)[:, :9, :9]
    # Sums over rows and products of matrices may be blocked differently.
    bound = oracle.tolerance(scores[:, :9, :9], MASKS["triangle"][:9, :9], 5)
    torch.testing.assert_close(again, first, atol=bound, rtol=0)


def test_a_score_above_the_diagonal_is_not_streamed():
    scores = torch.randn(9, 9, requires_grad=True)
    causal_sinkhorn(scores).square().sum().backward()
    assert not scores.grad.triu(1).any()
