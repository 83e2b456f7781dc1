"""Sinkhorn on `A = exp(C − r)`: one exponential, then matrix-vector products only; and its exact gradient.

With `r` the row maxima, every row of `A` has an entry equal to 1 and none above. The scalings `u = e^(f+r)`, `v = e^g`
start from `v = 1`:

    rows     u = 1/(A v)
    columns  s = Aᵀ(a∘u),  v = (t/s)^τ
    weights  diag(u) A diag(v)

They can leave the floating-point range where scores are extreme, or where a whole column lies far below its rows;
`Steps.safe` tells, and the caller then takes the log domain for that matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core.problem import Problem

# A matrix is safe while max u · max v stays below: so far inside the dtype's range that entries of A which were
# rounded to zero could not have mattered. From below it is bounded by itself: rows sum to 1.
LIMIT = {torch.float32: 1e30, torch.float64: 1e280}
# Sums run over at most so many terms in one product: BLAS adds them one after the other, and in float32 the rounding of
# 100,000 like terms adds up to nearly 1e-3 of their sum.
BLOCK = 1024
# exp is taken as an exact zero from here on: denormal numbers slow a CPU down tenfold, and a floor would leak mass.
VANISHING = {torch.float32: -87.0, torch.float64: -708.0}


class Steps(NamedTuple):
    """What the iterations leave behind: vectors only. `u` holds a row per row step, `s` one per column step."""

    u: Tensor  # (..., ceil(n_iters/2), n)
    s: Tensor  # (..., floor(n_iters/2), m)
    r: Tensor  # (..., n)
    safe: Tensor  # (...) bool


def row_shift(problem: Problem) -> Tensor:
    """Row maxima (..., n), 0 for rows out of the game."""
    return problem.scores.amax(-1).masked_fill(~problem.rows, 0.0)


def exponentiate(scores: Tensor, r: Tensor) -> Tensor:
    """`exp(scores − r)`, exactly zero where it would be denormal."""
    return _exp_(scores - r[..., None])


def exponentiate_(scores: Tensor, r: Tensor) -> Tensor:
    """`exponentiate` in the memory of the scores: a fresh matrix costs more than the passes over it."""
    return _exp_(scores.sub_(r[..., None]))


def _exp_(scores: Tensor) -> Tensor:
    return torch.threshold_(scores, VANISHING[scores.dtype], -torch.inf).exp_()


def iterate(kernel: Tensor, problem: Problem, tau: Tensor | None, r: Tensor, n_iters: int) -> Steps:
    """Run `n_iters` normalisations on the kernel (..., n, m)."""
    us, ss, reach = [], [], []
    u, v = r, torch.ones_like(problem.target)
    for step in range(n_iters):
        if step % 2 == 0:
            u = torch.where(problem.rows, 1 / apply(kernel, v), 0.0)
            us.append(u)
        else:
            s = apply(kernel.mT, u if problem.weight is None else u * problem.weight)
            ss.append(s)
            v = col_scaling(s, problem, tau)
        reach.append(u.amax(-1) * v.amax(-1))
    reach = torch.stack(reach, -1)
    limit = LIMIT[kernel.dtype]
    # Written so that NaN is unsafe. A matrix with nothing in the game has nothing to lose.
    safe = (reach < limit).all(-1) | ~problem.rows.any(-1)
    empty = v.new_empty((*v.shape[:-1], 0, v.shape[-1]))
    return Steps(torch.stack(us, -2), torch.stack(ss, -2) if ss else empty, r, safe)


def col_scaling(s: Tensor, problem: Problem, tau: Tensor | None) -> Tensor:
    """`v` from the column sums `s`; 0 for columns out of the game."""
    v = problem.target / s
    if tau is not None:
        v = v.pow(tau[..., None])
    return torch.where(problem.cols, v, 0.0)


def col_excess(s: Tensor, problem: Problem) -> Tensor:
    """`LSE_i(C + f + log a) − log t` (..., m) from the column sums; 0 for columns out of the game."""
    return torch.where(problem.cols, s.log() - problem.log_target(), 0.0)


def scalings(steps: Steps, problem: Problem, tau: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last `u` (..., n) and `v` (..., m)."""
    return steps.u[..., -1, :], _scaling_after(steps.s.shape[-2] - 1, steps, problem, tau)


def _scaling_after(step: int, steps: Steps, problem: Problem, tau: Tensor | None) -> Tensor:
    """`v` after a column step; before the first it is 1."""
    if step < 0:
        return torch.ones_like(problem.target)
    return col_scaling(steps.s[..., step, :], problem, tau)


class Adjoint(NamedTuple):
    """`x yᵀ` summed over the steps is what they subtract from the gradient, entry by entry times the kernel."""

    x: Tensor  # (..., n, n_iters)
    y: Tensor  # (..., m, n_iters)
    tau: Tensor | None  # (...)
    safe: Tensor  # (...) bool


def walk_back(kernel: Tensor, problem: Problem, tau: Tensor | None, steps: Steps, df: Tensor, dg: Tensor) -> Adjoint:
    """The adjoint of `iterate`, from the adjoints of the last potentials.

    Each step adds one rank-one term, so the iterates themselves are never needed as matrices.
    """
    n_iters = steps.u.shape[-2] + steps.s.shape[-2]
    xs, ys = [], []
    d_tau = torch.zeros_like(df[..., 0])
    for step in reversed(range(n_iters)):
        half = step // 2
        u = steps.u[..., half, :]
        if step % 2 == 0:
            v = _scaling_after(half - 1, steps, problem, tau)
            x, y = df * u, v
            if half:  # the first row step starts from a constant
                dg = dg - v * apply(kernel.mT, x)
            df = torch.zeros_like(df)
        else:
            s = steps.s[..., half, :]
            x, y = u if problem.weight is None else u * problem.weight, torch.where(problem.cols, dg / s, 0.0)
            if tau is not None:
                d_tau = d_tau - (dg * col_excess(s, problem)).sum(-1)
                y = y * tau[..., None]
            df = df - x * apply(kernel, y)
            dg = torch.zeros_like(dg)
        xs.append(x)
        ys.append(y)
    x, y = torch.stack(xs, -1), torch.stack(ys, -1)
    # Where the kernel is zero the product of two large factors would still overflow: 0 · inf.
    reach = x.abs().amax((-2, -1)) * y.abs().amax((-2, -1)) * n_iters
    return Adjoint(x, y, None if tau is None else d_tau, reach < torch.finfo(kernel.dtype).max / 4)


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """Batched matrix-vector product: (..., n, m) and (..., m) to (..., n).

    The vector stands on the left, as a matrix of one row: on the CPU torch's product is then 5 to 30 times as fast as
    with a matrix of one column on the right.
    """
    if vector.shape[-1] <= BLOCK:
        return (vector[..., None, :] @ matrix.mT)[..., 0, :]
    blocks = zip(matrix.split(BLOCK, -1), vector.split(BLOCK, -1), strict=True)
    return torch.stack([apply(*block) for block in blocks], -1).sum(-1)
