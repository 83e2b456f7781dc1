"""Newton's method and conjugate gradients: each sample reaches its own tolerance, also from a distant start."""

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
    # The tolerance, and as much again for the residual that is updated instead of recomputed.
    assert (left <= 2e-12 * side.flatten(1).norm(dim=1)).all()
    assert solved[2].eq(0).all()


def test_steps_are_shortened_if_newtons_step_would_diverge():
    """The gradient is nearly constant far away, so full steps overshoot more and more."""
    start = torch.tensor([3.0, 0.0, 0.01], dtype=torch.float64).reshape(3, 1, 1)
    goal = torch.full_like(start, 1e-12)
    found = find_zero(lambda x: torch.atan(10 * x) + 0.01 * x, start, goal)
    assert_close(found.x, torch.zeros_like(start), atol=1e-12, rtol=0)  # the goal; the slope is above 1
    assert (found.size <= goal).all()
    far, there, near = found.steps.flatten().tolist()
    assert there == 0
    assert 0 < near < far < 20


def test_a_goal_that_cannot_be_reached_ends_the_iteration():
    """The gradient is rounded, so that its norm cannot fall below a minimum."""
    start = torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    found = find_zero(lambda x: torch.round(x, decimals=3) + 0.001 + 0 * x, start, torch.full_like(start, 1e-9))
    assert found.size > 1e-9
    assert found.x.isfinite().all()
