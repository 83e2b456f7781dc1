"""Newton's method for strongly convex problems, with conjugate gradients for its linear systems.

All tensors are (…, n, d); each sample of the leading axes is a problem of its own with its own number of steps. Only
products with the Hessian are needed. It is symmetric, so they are vector–Jacobian products of the gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Relative tolerance of Newton's linear systems; a smaller one would not save steps.
FORCING = 1e-2
# Limits for problems that rounding keeps from converging; usual are fewer than 12 steps, and rarely a cut.
MOST_STEPS, MOST_CUTS = 200, 30


class Zero(NamedTuple):
    x: Tensor
    size: Tensor  # (…, 1, 1), the norm of the gradient at x
    steps: Tensor  # (…, 1, 1)


@torch.no_grad()
def find_zero(gradient: Callable[[Tensor], Tensor], start: Tensor, goal: Tensor) -> Zero:
    """Return an x at which the norm of `gradient` is at most `goal` (…, 1, 1), or the best x that was found.

    `size` is the norm that was reached. A step along Newton's direction is halved until the norm falls, which it does
    for some length wherever the Hessian is positive definite. No graph is kept between steps.
    """
    x, steps = start.detach(), torch.zeros_like(goal, dtype=torch.int64)
    stuck = torch.zeros_like(goal, dtype=torch.bool)
    for _ in range(MOST_STEPS):
        multiply, value = linearise(gradient, x)
        size = norm(value)
        going = (size > goal) & ~stuck
        if not going.any():
            break
        direction = conjugate_gradients(multiply, -value, FORCING)
        length, falls = torch.ones_like(size), ~going
        for _ in range(MOST_CUTS):
            falls = ~going | (norm(gradient(x + length * direction)) <= (1 - length / 4) * size)
            if falls.all():
                break
            length = torch.where(falls, length, length / 2)
        x = torch.where(going & falls, x + length * direction, x)
        steps, stuck = steps + (going & falls), stuck | ~falls
    return Zero(x, norm(gradient(x)), steps)


def linearise(gradient: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the product with the Hessian at x, as a function, and the gradient at x."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        value = gradient(x)
    return lambda vector: torch.autograd.grad(value, x, vector, retain_graph=True)[0], value.detach()


def conjugate_gradients(multiply: Callable[[Tensor], Tensor], side: Tensor, tol: float) -> Tensor:
    """Solve `H x = side` for a positive definite H, to a residual of `tol` times the norm of `side`."""
    x, residual = torch.zeros_like(side), side
    direction, energy = residual, norm(residual).square()
    goal = energy * tol**2
    for _ in range(2 * side.shape[-2] * side.shape[-1] + 10):
        going = energy > goal
        if not going.any():
            break
        image = multiply(direction)
        length = torch.where(going, energy / (direction * image).sum((-2, -1), keepdim=True), 0.0)
        x, residual = x + length * direction, residual - length * image
        previous, energy = energy, torch.where(going, norm(residual).square(), energy)
        direction = torch.where(going, residual + energy / previous * direction, 0.0)
    return x


def norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of each sample, (…, 1, 1)."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
