"""`sinkhorn(n_iters=math.inf)`: the limit and its gradient, and what Newton's method takes beside Sinkhorn's steps."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers import ConvergenceWarning, sinkhorn, sinkhorn_limit
from tests import limit_reference

TOL = 1e-11
CLOSE = {"atol": 1e3 * TOL, "rtol": 0}  # weights and gradients of order 1


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def masses(n, m, seed, spread=1.0):
    row, col = ((spread * normal(size, seed=seed + size)).softmax(-1) for size in (n, m))
    return {"row_mass": row, "col_mass": col}


@pytest.mark.parametrize("tau", [1.0, 0.9, 0.4])
@pytest.mark.parametrize("shape", [(9, 9), (5, 13), (13, 5), (1, 7), (7, 1)], ids=str)
def test_weights_and_gradients(shape, tau):
    mask = torch.ones(shape).bool()
    if min(shape) > 1:
        mask[2], mask[:, 3], mask[0, 0] = False, False, False
    scores, d_weights = torch.randn(2, *shape).double().requires_grad_(), torch.randn(2, *shape).double()
    tau = torch.tensor(tau).double().requires_grad_()
    found = sinkhorn(scores, n_iters=math.inf, tol=TOL, tau=tau, mask=mask)
    exact = limit_reference.weights(scores, mask, tau)
    pairs = zip(*(torch.autograd.grad(out, (scores, tau), d_weights) for out in (found, exact)), strict=True)
    for got, expected in [(found, exact), *pairs]:
        assert_close(got, expected, **CLOSE)


def test_masses():
    scores, given = torch.randn(2, 9, 6).double(), masses(9, 6, seed=3)
    found = sinkhorn(scores, n_iters=math.inf, tol=TOL, **given)
    assert_close(found.sum(-1), torch.ones(2, 9).double(), atol=1e-14, rtol=0)
    assert_close(given["row_mass"] @ found, given["col_mass"].expand(2, 6), atol=TOL, rtol=0)
    assert_close(found, sinkhorn(scores, n_iters=3001, **given), **CLOSE)


def test_it_is_sinkhorn_limit_at_the_same_tolerance():
    scores = 2 * torch.randn(3, 9, 6)
    assert sinkhorn(scores, n_iters=math.inf).equal(sinkhorn_limit(scores, tol=1e-3))
    assert sinkhorn(scores, n_iters=math.inf, tol=1e-5).equal(sinkhorn_limit(scores, tol=1e-5))


def test_one_warning_names_the_worst_residual():
    two_columns = torch.ones(6, 6).bool()
    two_columns[:3, 2:] = False  # three rows share two columns: no limit exists
    scores = torch.zeros(2, 6, 6)
    with pytest.warns(
        ConvergenceWarning, match=r"^sinkhorn: 2 of 2 matrices have not converged .*tolerance 0\.001"
    ) as seen:
        weights = sinkhorn(scores, n_iters=math.inf, mask=two_columns)
    assert len(seen) == 1
    assert f"the largest residual is {(weights.sum(-2) - 1).abs().max():.2g}," in str(seen[0].message)
    assert_close(weights.sum(-1), torch.ones(2, 6), atol=1e-6, rtol=0)


def hub(n, m, std, seed):
    """One row and half of the columns are near 0, all else near −std: mass has to leave the hub."""
    scores = torch.full((n, m), -float(std), dtype=torch.float64)
    scores[0], scores[:, : m // 2] = 0, 0
    return scores + 0.1 * normal(n, m, seed=seed)


def block(n, m, std, seed):
    """Two blocks, with next to nothing between them."""
    scores = std * normal(n, m, seed=seed)
    scores[: n // 2, m // 2 :] -= 5 * std
    scores[n // 2 :, : m // 2] -= 5 * std
    return scores


def window(n, width):
    at = torch.arange(n)
    return {"mask": (at[:, None] - at).abs() <= width}


def cases():
    """Scores and options, by name."""
    for n in (9, 40):
        for std in (1, 4, 16, 30):
            yield f"normal {n} std {std}", std * normal(n, n, seed=n + std), {}
        for std in (2, 16):
            yield f"hub {n} std {std}", hub(n, n, std, n + std), {}
            yield f"block {n} std {std}", block(n, n, std, n + std), {}
            yield f"window {n} std {std}", std * normal(n, n, seed=n + std), window(n, max(1, n // 8))
            yield f"masses {n} std {std}", std * normal(n, n + 3, seed=n + std), masses(n, n + 3, seed=std)
        for tau in (0.99, 0.9, 0.5, 0.1):
            yield f"relaxed {n} tau {tau}", 8 * normal(n, n, seed=n), {"tau": tau}
        for m in (n // 2, n + 3, 2 * n):
            yield f"rectangular {n} by {m}", 4 * normal(n, m, seed=m), {}


def test_newton_takes_few_more_products_than_sinkhorn_or_fewer():
    """Where Sinkhorn's steps alone converge, it takes at most 1.2 times as many products and 30, and converges too."""
    tol, worse, total = 1e-4, [], torch.zeros(2, dtype=torch.int64)
    for number, (name, scores, options) in enumerate(cases()):
        dtype = (torch.float32, torch.float64)[number % 2]
        given = {
            key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in options.items()
        }
        given |= {key: given[key] / given[key].sum() for key in ("row_mass", "col_mass") if key in given}
        settings = {"tol": tol, "max_iters": 1500, "return_info": True, **given}
        weights, newton = sinkhorn_limit(scores.to(dtype), method="newton", **settings)
        _, steps = sinkhorn_limit(scores.to(dtype), method="sinkhorn", **settings)
        assert weights.isfinite().all(), name
        assert (newton.residual <= 1.2 * steps.residual + tol).all(), name
        if not steps.converged:
            continue
        total += torch.stack([newton.products, steps.products])
        if not newton.converged or newton.products > 1.2 * steps.products + 30:
            worse.append((name, int(newton.products), int(steps.products)))
    assert not worse
    assert total[0] < total[1]


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-3), (torch.float64, 1e-6)], ids=str)
def test_scores_that_are_nearly_a_permutation(dtype, tol):
    """Where rows put all their weight on one column each, the curvature of D is rounding and its slope is not."""
    scores = 300 * torch.randn(500, 4, 4, generator=generator(0)).to(dtype)
    _, info = sinkhorn_limit(scores, tol=tol, return_info=True)
    assert info.converged.all()
    assert info.products.max() <= 400
    assert info.products.double().mean() <= 100
