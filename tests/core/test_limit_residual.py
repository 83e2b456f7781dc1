"""For tau < 1 the residual bounds the error of every weight, however many steps were taken.

The limit itself is found independently: Newton's method on the dual `Σ_i LSE_j(C + g) + (ρ/λ) Σ_j e^(−λ g_j)`,
λ = 1/τ − 1, whose gradient in g is the column sums less `ρ e^(−λ g)`, and whose Hessian is positive definite.
"""

import math

import pytest
import torch

from sinkformers import ConvergenceWarning, marginal_error, sinkhorn_limit
from sinkformers.core.limit_iteration import tolerance_floor

EPS = torch.finfo(torch.float32).eps


def newton(scores, tau, mask=None):
    """The limit of one matrix (n, m) in float64, to 1e-12 in the potentials."""
    scores = scores.double() if mask is None else scores.double().masked_fill(~mask, -torch.inf)
    rows, cols = (scores > -torch.inf).any(1), (scores > -torch.inf).any(0)
    small, strength = scores[rows][:, cols], 1 / tau - 1
    n, m = small.shape
    g = torch.zeros(m, dtype=torch.float64)

    def dual(g):
        return torch.logsumexp(small + g, 1).sum() + n / m / strength * torch.exp(-strength * g).sum()

    for _ in range(200):
        weights = (small + g).softmax(1)
        sums, aims = weights.sum(0), n / m * torch.exp(-strength * g)
        hessian = torch.diag(sums + strength * aims) - weights.T @ weights
        step = torch.cholesky_solve((aims - sums)[:, None], torch.linalg.cholesky(hessian))[:, 0]
        length = 1.0
        while dual(g + length * step) > dual(g) + 1e-14 * dual(g).abs() and length > 1e-6:
            length /= 2
        g = g + length * step
        if step.abs().max() < 1e-12 * (1 + g.abs().max()):
            break
    else:
        raise AssertionError("the oracle has not converged")
    out = torch.zeros_like(scores)
    out[rows.nonzero(), cols.nonzero()[:, 0]] = (small + g).softmax(1)
    return out


def blocks(n, m):
    mask = torch.zeros(n, m, dtype=torch.bool)
    mask[: n // 3, : m // 2] = mask[n // 3 :, m // 2 :] = True
    return mask


def padded(n, m):
    return (torch.arange(n) < n - 2)[:, None] & (torch.arange(m) > 0)


def window(n, m):
    return (torch.arange(n)[:, None] * m - torch.arange(m) * n).abs() < 2 * n * m // min(n, m)


MASKS = {"none": lambda *_: None, "blocks": blocks, "padded": padded, "window": window}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("std", [1.0, 4.0, 16.0])
@pytest.mark.parametrize(("n", "m"), [(17, 17), (29, 7), (5, 31)])
def test_no_weight_is_further_from_its_limit_than_the_residual(n, m, std, mask):
    """Rounding alone is left beside it: 1e-16 in a step, amplified by no more than 1/(1 − τ) = 1000."""
    scores, entries = std * torch.randn(n, m, dtype=torch.float64), MASKS[mask](n, m)
    taus = torch.tensor([0.1, 0.5, 0.9, 0.99, 0.999], dtype=torch.float64)
    exact = torch.stack([newton(scores, tau, entries) for tau in taus])
    for max_iters in (1, 3, 11, 101, 501):
        options = {"tau": taus, "mask": entries, "max_iters": max_iters, "tol": 1e-9}
        weights, info = sinkhorn_limit(scores.expand(5, n, m), return_info=True, **options)
        assert ((weights - exact).abs().amax((-2, -1)) <= info.residual + 1e-11).all()
        assert (info.residual <= 1).all()
        assert info.converged.equal(info.residual <= 1e-9)


@pytest.mark.parametrize("std", [1.0, 4.0, 16.0])
def test_large_matrices_in_float32(std):
    """The exponents carry eps·|score|, which moves g and then the weights as a change of the scores does."""
    scores = std * torch.randn(2, 256, 256)
    taus = torch.tensor([0.9, 0.99])
    weights, info = sinkhorn_limit(scores, tau=taus, return_info=True)
    for index, tau in enumerate(taus.tolist()):
        rounding = EPS * (256**0.5 + scores.abs().max().item()) / (4 * (1 - tau))
        error = (weights[index].double() - newton(scores[index], tau)).abs().max().item()
        assert error <= info.residual[index].item() + rounding


def hub(n):
    """A row and half of the columns hold everything: scalings drift apart, and are absorbed every some steps."""
    scores = torch.full((n, n), -100.0, dtype=torch.float64)
    scores[0], scores[:, : n // 2] = 0, 0
    return scores


@pytest.mark.parametrize("scores", [torch.linspace(-2, 2, 63).double().cos().reshape(9, 7), hub(64)])
def test_the_residual_is_that_of_the_fixed_point(scores):
    tau, (n, m) = 0.9, scores.shape
    g = torch.zeros(m, dtype=torch.float64)
    for max_iters in range(1, 100, 2):
        f = -torch.logsumexp(scores + g, 1)
        after = -tau * (torch.logsumexp(scores + f[:, None], 0) - math.log(n / m))
        spread = (after - g).max() - (after - g).min()
        _, info = sinkhorn_limit(scores, tau=tau, tol=1e-14, max_iters=max_iters, return_info=True)
        if info.iterations == max_iters:  # rounding of potentials of size 100, times 1/(4·0.1)
            expected = torch.tanh(spread / (4 * (1 - tau)))
            torch.testing.assert_close(info.residual, expected, atol=1e-11, rtol=0)
        g = after


def test_the_bound_is_not_idle():
    """At a tau of ½ it is of the size of the error, and falls with it."""
    scores = 2 * torch.randn(17, 17, dtype=torch.float64)
    exact = newton(scores, 0.5)
    for max_iters in (5, 9, 13, 17):
        weights, info = sinkhorn_limit(scores, tau=0.5, tol=1e-15, max_iters=max_iters, return_info=True)
        error = (weights - exact).abs().max()
        assert error <= info.residual <= 20 * error


def test_slow_convergence_is_told():
    """Two groups that hardly exchange mass: weights change little in a step, and are far from their limit."""
    scores = torch.zeros(8, 8, dtype=torch.float64)
    scores[:5, :4], scores[5:, 4:] = 20.0, 20.0
    exact = newton(scores, 0.999)
    before, _ = sinkhorn_limit(scores, tau=0.999, max_iters=19, return_info=True)
    weights, info = sinkhorn_limit(scores, tau=0.999, max_iters=21, return_info=True)
    assert (weights - before).abs().max() < 1e-6
    assert 0.04 < (weights - exact).abs().max() <= info.residual
    assert not info.converged


def test_constants_of_components_do_not_count():
    """They fall as tau^k, which takes 1,400 pairs of steps to 1e-6 at 0.99, and cancel in the weights."""
    scores = torch.randn(12, 12, dtype=torch.float64)
    mask = torch.block_diag(torch.ones(4, 8), torch.ones(8, 4)) > 0
    order = torch.randperm(12)
    scores, mask = scores[order], mask[order]
    weights, info = sinkhorn_limit(scores, tau=0.99, mask=mask, tol=1e-6, max_iters=201, return_info=True)
    assert info.converged
    assert (weights - newton(scores, 0.99, mask)).abs().max() <= 1e-6
    chain = torch.ones(40, 40).tril(1).triu() > 0  # one component, column after column
    weights, info = sinkhorn_limit(torch.randn(40, 40).double(), tau=0.5, mask=chain, tol=1e-9, return_info=True)
    assert info.converged


def test_a_tau_of_zero_is_there_at_once():
    _, info = sinkhorn_limit(torch.randn(3, 5, 7), tau=0.0, return_info=True)
    assert (info.iterations.tolist(), info.residual.tolist(), info.converged.tolist()) == (
        [1] * 3,
        [0.0] * 3,
        [True] * 3,
    )


def test_the_warning_tells_the_tolerance_of_a_relaxed_matrix():
    scores, tau = 4 * torch.randn(17, 17), 0.999
    floor = torch.tanh(torch.tensor(2 * tolerance_floor(torch.float32, 17, 17) / (4 * (1 - tau)))).item()
    with pytest.warns(ConvergenceWarning, match=f"the tolerance {floor:.2g}"):
        sinkhorn_limit(scores, tau=tau, max_iters=5)


def test_a_tau_of_one_is_still_judged_by_its_columns():
    scores = 2 * torch.randn(17, 13, dtype=torch.float64)
    weights, info = sinkhorn_limit(scores, tau=torch.ones(()), max_iters=7, return_info=True)
    _, cols = marginal_error(weights)
    torch.testing.assert_close(info.residual, cols / (17 / 13), atol=1e-14, rtol=0)
