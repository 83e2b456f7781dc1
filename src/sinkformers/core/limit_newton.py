"""Newton's method for the limit, on the kernel of the iterations.

A row step after every update keeps the rows exact, so that the column potentials `g` are the only unknowns. They
minimise a convex function: with weights P, row weights a, targets t and λ = 1/τ − 1,

    D(g) = Σ_i a_i LSE_j(C + g) + (1/λ) Σ_j t_j e^(−λ g_j)        (−Σ_j t_j g_j for τ = 1)

Its gradient is `c − t e^(−λ g)`, where `c = Pᵀa` are the column sums, and its Hessian is
`diag(c + λ t e^(−λ g)) − Pᵀ diag(a) P`. Conjugate gradients take one product with P and one with Pᵀ per step, which
are products with the stored kernel; nothing is exponentiated again. For τ = 1 the Hessian is singular along a vector
per connected component of the support, to which the gradient is orthogonal where a limit exists.

On failure nothing is lost but the products of a step: where the function does not fall, the scalings stay as they were.
"""

import torch
from torch import Tensor

from sinkformers.core.limit_iteration import Iteration

# Conjugate gradients stop at this share of the gradient, or at the square root of the residual where that is less.
COARSEST = 0.3
MOST_SOLVER_STEPS = 25
MOST_TRIALS = 5
# Products beside those of the solver: the diagonal of the Hessian, the trials, and the column sums.
OTHER_PRODUCTS = MOST_TRIALS + 2
# A step may change no potential by more: two columns then move against each other by 70 at most, and entries of the
# kernel that are zero, below e⁻⁸⁷ in float32, stay below rounding. With more, D would seem to fall on the way there and
# on the way back.
LARGEST_CHANGE = 35.0


def step(run: Iteration, which: Tensor, residual: Tensor, most_steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take one Newton step where `which` (k), and return where it was accepted, where D fell by more than rounding, and
    the products it took.

    `most_steps` (k) limits the steps of the solver, which take two products each.
    """
    direction, gap, steps = _solve(run, which, residual.sqrt().clamp(1e-6, COARSEST), most_steps)
    accepted, visible, trials = _search(run, direction, gap, which)
    return accepted, visible, torch.where(which, 2 * steps + trials + 2, 0)


def _bend(run: Iteration) -> Tensor | None:
    """λ (k, 1); None where all are 0."""
    return None if run.tau is None else (1 / run.tau - 1)[:, None]


def _solve(run: Iteration, which: Tensor, ratio: Tensor, most_steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The direction (k, m) of a Newton step, minus the gradient (k, m), and the steps of the solver (k)."""
    cols, now, bend, sums = run.problem.cols, run.target(), _bend(run), run.sums()
    gap = torch.where(cols, now - sums, 0.0)
    scale = sums if bend is None else sums + bend * now
    own = run.v.square() * run.squares_transposed(run.weighted(run.u.square()))
    eps = torch.finfo(sums.dtype).eps
    precondition = torch.where(cols, 1 / torch.maximum(scale - own, 32 * eps * scale), 0.0)
    solution, rest = torch.zeros_like(gap), gap
    direction = precondition * rest
    energy = (rest * direction).sum(-1, keepdim=True)
    goal, going = ratio[:, None].square() * energy, which[:, None]
    steps = torch.zeros_like(which, dtype=torch.int64)
    by_row = run.weighted(run.u.square())
    for number in range(MOST_SOLVER_STEPS):
        going = going & (energy > goal) & (number < most_steps[:, None])
        if due(number, going) and not going.any():
            break
        steps += going[:, 0]
        through = run.v * run.times_transposed(by_row * run.times(run.v * direction))
        image = scale * direction - through
        curvature = (direction * image).sum(-1, keepdim=True)
        # Along a null vector the curvature is rounding, and so is what it would be divided into. The first direction is
        # none: where its curvature is that small, D falls along it as far as a step may go.
        bent = curvature > 16 * eps * (scale * direction.square()).sum(-1, keepdim=True)
        farthest = LARGEST_CHANGE / direction.abs().amax(-1, keepdim=True)
        length = torch.where(going, torch.where(bent, energy / curvature, farthest if number == 0 else 0.0), 0.0)
        going = going & bent
        solution, rest = solution + length * direction, torch.where(going, rest - length * image, rest)
        scaled = precondition * rest
        previous, energy = energy, torch.where(going, (rest * scaled).sum(-1, keepdim=True), energy)
        direction = torch.where(going, scaled + energy / previous * direction, direction)
    return solution, gap, steps


def _search(run: Iteration, direction: Tensor, gap: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Go along a direction until D falls as it should, up to rounding; where it does not, stay.

    Returns where a point was accepted, where D fell by more than rounding, and the trials, (k).
    """
    length, settled = torch.ones_like(gap[..., 0]), ~(which & ((gap * direction).sum(-1) > 0))
    accepted, visible = torch.zeros_like(which), torch.zeros_like(which)
    trials = torch.zeros_like(which, dtype=torch.int64)
    now, bend, u, v, g = run.target(), _bend(run), run.u, run.v, run.g
    eps = torch.finfo(gap.dtype).eps
    rounding = 4 * eps * now.sum(-1)  # that of the row sums
    found_u, found_v, found_g = u, v, g
    for _ in range(MOST_TRIALS):
        if settled.all():
            break
        trials += ~settled
        change = (length[:, None] * direction).clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
        new_v = torch.where(run.problem.cols, v * change.exp(), 0.0)
        new_u = torch.where(run.problem.rows, 1 / run.times(new_v), 0.0)
        # What D changes by, row by row and column by column: the difference of two sums would be rounding.
        by_row = run.weighted(torch.where(run.problem.rows, (u / new_u).log(), 0.0))
        by_col = -now * (change if bend is None else torch.where(bend == 0, change, -(-bend * change).expm1() / bend))
        fall = -(run.sum_over_rows(by_row) + by_col.sum(-1))
        noise = 4 * eps * (run.sum_over_rows(by_row.abs()) + by_col.abs().sum(-1))
        good = ~settled & (fall >= 1e-4 * (gap * change).sum(-1).clamp_min(0.0) - noise)
        pick = good[:, None]
        found_u, found_v = torch.where(pick, new_u, found_u), torch.where(pick, new_v, found_v)
        found_g = torch.where(pick, g + change, found_g)
        accepted, visible, settled = accepted | good, visible | (good & (fall > noise + rounding)), settled | good
        length = length / 3
    run.moved(found_u, found_v, found_g)
    return accepted, visible, trials


def due(number: int, flags: Tensor) -> bool:
    """Whether to read flags in this step of a loop: on an accelerator every fourth time, since reading synchronises."""
    return number % 4 == 0 or flags.device.type == "cpu"
