"""Gradients by finite differences, unrolled and implicit, and what they cost in memory."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_limit
from tests.saved import saved_bytes

SHAPES = [(5, 5), (3, 7), (7, 3), (1, 4), (2, 3, 5)]


def scores_of(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
def test_plain(shape, n_iters):
    gradcheck(lambda c: sinkhorn(c, n_iters=n_iters, backend="torch"), scores_of(shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_iters", [1, 2, 3, 7])
def test_masked_with_tau(shape, n_iters):
    mask = torch.rand(shape) > 0.3
    tau = torch.rand(shape[:-2], dtype=torch.float64, requires_grad=True)
    for backend in ("torch", "reference"):
        gradcheck(
            lambda c, t: sinkhorn(c, n_iters=n_iters, tau=t, mask=mask, backend=backend),  # noqa: B023
            (scores_of(shape), tau),
        )


@pytest.mark.parametrize("n_iters", [1, 2, 3, 7])
def test_masses(n_iters):
    row = torch.rand(2, 5, dtype=torch.float64).softmax(-1)
    col = torch.tensor([0.0, 0.5, 0.2, 0.3], dtype=torch.float64)
    tau = torch.tensor([0.3, 1.0], dtype=torch.float64)
    for masses in ({"row_mass": row}, {"col_mass": col}, {"row_mass": row, "col_mass": col}):
        gradcheck(lambda c: sinkhorn(c, n_iters=n_iters, tau=tau, **masses), scores_of((2, 5, 4)))  # noqa: B023


def test_tau_at_its_ends_has_a_gradient():
    for value in (0.0, 1.0):
        tau = torch.full((2,), value, dtype=torch.float64, requires_grad=True)
        scores = torch.randn(2, 5, 7, dtype=torch.float64)
        d_weights = torch.randn(2, 5, 7, dtype=torch.float64)
        for n_iters in (2, 3, 5):
            (got,) = torch.autograd.grad(sinkhorn(scores, n_iters=n_iters, tau=tau), tau, d_weights)
            step = 1e-6 if value == 0 else -1e-6
            moved = sinkhorn(scores, n_iters=n_iters, tau=tau.detach() + step)
            still = sinkhorn(scores, n_iters=n_iters, tau=tau.detach())
            expected = ((moved - still) * d_weights).sum((-2, -1)) / step
            assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert torch.autograd.grad(sinkhorn(scores, n_iters=1, tau=tau).sum(), tau)[0].eq(0).all()


def test_one_tau_for_many_heads_sums_their_gradients():
    scores = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    tau = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    each = tau.detach().expand(2, 3).clone().requires_grad_()
    d_weights = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    (shared,) = torch.autograd.grad(sinkhorn(scores, tau=tau), tau, d_weights)
    (separate,) = torch.autograd.grad(sinkhorn(scores, tau=each), each, d_weights)
    assert_close(shared, separate.sum(0))


def test_the_reference_can_be_differentiated_twice():
    mask = torch.rand(4, 5) > 0.2
    gradgradcheck(lambda c: sinkhorn(c, n_iters=3, mask=mask, backend="reference"), scores_of((4, 5)))


def test_the_fast_gradient_refuses_a_second_derivative():
    scores = scores_of((4, 5))
    (grad,) = torch.autograd.grad(sinkhorn(scores).square().sum(), scores, create_graph=True)
    with pytest.raises(NotImplementedError, match='backend="reference"'):
        grad.sum().backward()


def test_softmax_can_be_differentiated_twice_too():
    gradgradcheck(lambda c: sinkhorn(c, n_iters=1), scores_of((4, 5)))


LIMITS = {
    "square": {},
    "rows weighted": {"row_mass": torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15], dtype=torch.float64)},
    "relaxed": {"tau": 0.6},
    "blocks": {"mask": torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)) > 0},
    "padding": {"mask": (torch.arange(5) < 4)[:, None] & (torch.arange(5) > 0)},
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_by_finite_differences(name):
    gradcheck(lambda c: sinkhorn_limit(c, tol=1e-15, max_iters=5001, **LIMITS[name]), scores_of((5, 5)))


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("std", [0.5, 2.0])
def test_implicit_is_unrolled_where_converged(name, std):
    scores = (std * torch.randn(3, 5, 5, dtype=torch.float64)).requires_grad_()
    d_weights = torch.randn(3, 5, 5, dtype=torch.float64)
    options = LIMITS[name]
    limit = sinkhorn_limit(scores, tol=1e-15, max_iters=5001, **options)
    many = sinkhorn(scores, n_iters=1001, **options)
    assert_close(limit, many, atol=1e-12, rtol=0)
    (implicit,) = torch.autograd.grad(limit, scores, d_weights)
    (unrolled,) = torch.autograd.grad(many, scores, d_weights)
    assert_close(implicit, unrolled, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("n", "m"), [(5, 11), (11, 5)])
def test_implicit_on_rectangles(n, m):
    gradcheck(lambda c: sinkhorn_limit(c, tol=1e-15, max_iters=5001), scores_of((n, m)))
    row, col = torch.rand(n).double().softmax(-1), torch.rand(m).double().softmax(-1)
    gradcheck(lambda c: sinkhorn_limit(c, tol=1e-15, max_iters=5001, row_mass=row, col_mass=col), scores_of((n, m)))


@pytest.mark.parametrize("value", [0.3, 0.9, 1.0])
def test_the_gradient_of_tau_at_the_limit(value):
    scores = torch.randn(4, 6, dtype=torch.float64)
    d_weights = torch.randn(4, 6, dtype=torch.float64)
    tau = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(sinkhorn_limit(scores, tau=tau, tol=1e-15, max_iters=20001), tau, d_weights)
    step = 1e-5
    below, above = value - step, min(value + step, 1)
    low, high = (sinkhorn_limit(scores, tau=t, tol=1e-15, max_iters=200001) for t in (below, above))
    expected = ((high - low) * d_weights).sum() / (above - below)
    assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_iterations_save_vectors_only():
    scores, mask = torch.randn(3, 131, 137, requires_grad=True), torch.rand(131, 137) > 0.1
    few, many = (saved_bytes(lambda: sinkhorn(scores, n_iters=k, mask=mask, tau=0.5)) for k in (3, 21))  # noqa: B023
    vectors = (21 - 3) * (131 + 137) // 2 * 3 * 4
    assert few >= scores.nbytes
    assert many <= 1.1 * (few + vectors)
