"""The gradient at a fixed point, by the implicit function theorem: no iterate is saved or differentiated.

At convergence the potentials solve `row sums = 1`, `g = −τ·(LSE_i(C + f + log a) − log t)`. With `Ŵ = diag(a)·weights`,
a change of the scores moves them by the solution of a symmetric system with the blocks

    diag(Ŵ1)   Ŵ
    Ŵᵀ         diag(Ŵᵀ1)/τ

so the gradient is `G − Ŵ∘(x ⊕ y)`, where `G = weights∘dW` and (x, y) solves that system for the row and column sums of
`G`. For τ = 1 it is singular, once per connected component of the support, with a right-hand side orthogonal to every
null vector; conjugate gradients then need no projection. They run on `z = y/τ` alone, the rows being eliminated.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sinkformers.core.kernel_domain import apply

# The least, relative to the right-hand side; a little above what rounding lets conjugate gradients reach.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}
# That of the system, as a share of the tolerance of the weights: their error has to be the larger one.
SHARE_OF_TOLERANCE = 0.1
# Up to this τ the eigenvalues of the system, relative to diag(cols), are bounded away from 0.
BOUNDED = 0.9


def gradient(
    weights: Tensor,
    d_weights: Tensor,
    weight: Tensor | None,
    tau: Tensor | None,
    excess: Tensor,
    tol: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the scores (..., n, m) and of tau (...), at weights (..., n, m) taken as converged.

    Args:
        weights, d_weights: in float32 or float64; zero where masked.
        weight: the row weights `a` (..., n), or None where all are 1.
        excess: `LSE_i(C + f + log a) − log t` (..., m), read for the gradient of tau only.
        tol: of the weights; 0 where they are to be taken as they are.
    """
    local = weights * d_weights
    plan = weights if weight is None else weights * weight[..., None]
    rows, cols = plan.sum(-1), plan.sum(-2)
    row_side, col_side, per_row = local.sum(-1), local.sum(-2), _reciprocal(rows)
    side = col_side - apply(plan.mT, per_row * row_side)
    # Where these sums cancel, what is left of them is rounding, which no solution should follow.
    size = local.abs().sum(-2) + apply(plan.mT, per_row * local.abs().sum(-1))
    own = apply(plan.square().mT, per_row)

    def through(direction: Tensor) -> Tensor:
        return apply(plan.mT, per_row * apply(plan, direction))

    z = solve(through, own, cols, tau, side, size, tol)
    y = z if tau is None else tau[..., None] * z
    x = per_row * (row_side - apply(plan, y))
    grad = local - plan * (x[..., None] + y[..., None, :])
    if tau is None:
        return grad, None
    # At tau = 1 the excess is known up to a constant per component; it drops out, since cols∘z sums to 0 there.
    return grad, -(z * cols * excess).sum(-1)


def solve(
    through: Callable[[Tensor], Tensor],
    own: Tensor,
    cols: Tensor,
    tau: Tensor | None,
    side: Tensor,
    size: Tensor,
    tol: float,
) -> Tensor:
    """Solve `(diag(cols) − τ·M) z = side`, where M is `planᵀ diag(per_row) plan`, by conjugate gradients.

    Args:
        through: the product with M; `own` (..., m) is its diagonal, which preconditions the system.
        size: what the sums in `side` are made of, by absolute value.
        tol: of the weights.

    For τ < 1 the sum of `cols∘z` over a connected component is 0, like that of `side`. Where τ is a tensor near 1 this
    is what its gradient needs and what the system hardly determines; `diag(cols)` alone keeps it at every step.

    Each matrix stops by itself, once its residual is small, or no larger than the rounding `noise` in `side`, or once
    the curvature is no larger than rounding.
    """
    eps = torch.finfo(side.dtype).eps
    accuracy, noise = max(SHARE_OF_TOLERANCE * tol, TOLERANCE[side.dtype]), 4 * eps * size
    if tau is not None:
        own = torch.where(tau[..., None] <= BOUNDED, tau[..., None] * own, 0.0)
    least = 32 * eps * cols
    precondition = _reciprocal(torch.maximum(cols - own, least))
    # What follows squares these numbers, which may be as small or as large as numbers are.
    scale = side.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    side, noise = side / scale, noise / scale
    z, residual = torch.zeros_like(side), side
    direction = precondition * residual
    energy = (residual * direction).sum(-1, keepdim=True)
    goal = energy * accuracy**2
    goal = goal.maximum((precondition * noise.square()).sum(-1, keepdim=True))
    rounding = 16 * eps
    for step in range(min(2 * side.shape[-1] + 50, 2000)):
        going = energy > goal
        if step % 4 == 0 and not going.any():
            break
        image = through(direction)
        image = cols * direction - (image if tau is None else tau[..., None] * image)
        curvature = (direction * image).sum(-1, keepdim=True)
        # What is left may be rounding, along a null vector whose curvature is rounding too: their ratio has no meaning.
        going = going & (curvature > rounding * (cols * direction.square()).sum(-1, keepdim=True))
        length = torch.where(going, energy / curvature, 0.0)
        z, residual = z + length * direction, residual - length * image
        scaled = precondition * residual
        previous, energy = energy, torch.where(going, (residual * scaled).sum(-1, keepdim=True), goal)
        direction = scaled + torch.where(going, energy / previous, 0.0) * direction
    return z * scale


def _reciprocal(x: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, 1 / x)
