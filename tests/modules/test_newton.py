"""Zeros of gradients: of quadratics in one step, of others from afar, each sample for itself."""

import torch
from torch.testing import assert_close

from sinkformers.modules.newton import conjugate_gradients, find_zero


def rand(*size):
    return torch.randn(*size, dtype=torch.float64)


def positive_definite(size, condition):
    basis, _ = torch.linalg.qr(rand(size, size))
    return basis @ torch.diag(torch.logspace(0, condition, size, dtype=torch.float64)) @ basis.T


def test_conjugate_gradients_solve_each_system_to_its_own_tolerance():
    matrix, exact = positive_definite(15, 3), rand(3, 5, 3)
    exact[1] *= 1e-6
    exact[2] = 0

    def multiply(x):
        return (x.flatten(1) @ matrix).reshape(x.shape)

    side = multiply(exact)
    solved = conjugate_gradients(multiply, side, 1e-12)
    left = (multiply(solved) - side).flatten(1).norm(dim=1)
    assert (left <= 2e-12 * side.flatten(1).norm(dim=1)).all()
    assert solved[2].eq(0).all()


def test_steps_are_cut_where_newtons_own_would_diverge():
    """The derivative of a convex function that is nearly linear from afar: the full step overshoots, ever further."""
    start = torch.tensor([3.0, 0.0, 0.01], dtype=torch.float64).reshape(3, 1, 1)
    goal = torch.full_like(start, 1e-12)
    found = find_zero(lambda x: torch.atan(10 * x) + 0.01 * x, start, goal)
    assert_close(found.x, torch.zeros_like(start), atol=1e-12, rtol=0)
    assert (found.size <= goal).all()
    far, there, near = found.steps.flatten().tolist()
    assert there == 0
    assert 0 < near < far < 20


def test_what_cannot_be_reached_ends():
    """A gradient of a size that rounding keeps it from falling below."""
    start = torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    found = find_zero(lambda x: torch.round(x, decimals=3) + 0.001 + 0 * x, start, torch.full_like(start, 1e-9))
    assert found.size > 1e-9
    assert found.x.isfinite().all()
