"""Where a gradient vanishes, for strongly convex problems: Newton's method, with conjugate gradients inside.

All tensors are (…, n, d); every sample of the leading axes is a problem of its own, and stops by itself. The Hessian is
seen through products alone: it is symmetric, so that autograd's vector–Jacobian product of the gradient is one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Newton's systems are solved to this part of the gradient: more digits would be lost to the next step.
FORCING = 1e-2
# A dozen steps is many and a few cuts are rare: these only end what rounding keeps from ending.
MOST_STEPS, MOST_CUTS = 200, 30


class Zero(NamedTuple):
    x: Tensor
    size: Tensor  # (…, 1, 1), the norm of the gradient at x
    steps: Tensor  # (…, 1, 1)


@torch.no_grad()
def find_zero(gradient: Callable[[Tensor], Tensor], start: Tensor, goal: Tensor) -> Zero:
    """The x where `gradient` is at most `goal` (…, 1, 1) in norm; or the best that was reached, which `size` tells.

    A step goes as far along Newton's direction as the norm of the gradient falls, which it does for some length
    wherever the Hessian is positive definite. No graph is kept from one step to the next.
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
    """The product with the Hessian at x, as a function, and the gradient there."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        value = gradient(x)
    return lambda vector: torch.autograd.grad(value, x, vector, retain_graph=True)[0], value.detach()


def conjugate_gradients(multiply: Callable[[Tensor], Tensor], side: Tensor, tol: float) -> Tensor:
    """Solve `H x = side` for a positive definite H, until the residual is `tol` of the side in norm."""
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
    """The Euclidean norm of each sample, (…, 1, 1)."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
