"""Sinkhorn in the kernel domain: one exponential, then matrix-vector products only; and its exact gradient.

With `r` the row maxima, every row of `A = exp(C − r)` has an entry equal to 1 and none above. The scalings
`u = e^(f+r)`, `v = e^g` start from `v = 1`:

    rows     u = 1/(A v)
    columns  s = Aᵀ(a∘u),  v = (t/s)^τ
    weights  diag(u) A diag(v)

They can leave the floating-point range where scores are extreme, or where a whole column lies far below its rows;
`State.safe` says so, and the caller then uses the log domain for that matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core.definition import Definition
from sinkformers.core.problem import Problem
from sinkformers.core.ranges import BLOCK, SAFE_PRODUCT, SMALLEST_EXPONENT
from sinkformers.core.state import State


def row_shift(problem: Problem) -> Tensor:
    """Row maxima (..., n), 0 for empty rows."""
    return problem.scores.amax(-1).masked_fill(~problem.rows, 0.0)


def exponentiate(scores: Tensor, r: Tensor) -> Tensor:
    """`exp(scores − r)`, exactly zero where it would be denormal."""
    return _exp_(scores - r[..., None])


def exponentiate_(scores: Tensor, r: Tensor) -> Tensor:
    """`exponentiate` in the memory of the scores: a new matrix costs more than the passes over it."""
    return _exp_(scores.sub_(r[..., None]))


def _exp_(scores: Tensor) -> Tensor:
    return torch.threshold_(scores, SMALLEST_EXPONENT[scores.dtype], -torch.inf).exp_()


def iterate(kernel: Tensor, problem: Problem, tau: Tensor | None, r: Tensor, definition: Definition) -> State:
    """Run the normalisations on the kernel (..., n, m). The state holds `u` per row step and `s` per column step."""
    us, ss, products = [], [], []
    u, v = r, torch.ones_like(problem.target)
    for step in definition.steps():
        if step.rows:
            u = torch.where(problem.rows, 1 / apply(kernel, v), 0.0)
            us.append(u)
        else:
            s = apply(kernel.mT, u if problem.weight is None else u * problem.weight)
            ss.append(s)
            v = col_scaling(s, problem, tau)
        products.append(u.amax(-1) * v.amax(-1))
    # Written so that NaN is unsafe. An empty matrix is safe.
    safe = (torch.stack(products, -1) < SAFE_PRODUCT[kernel.dtype]).all(-1) | ~problem.rows.any(-1)
    empty = v.new_empty((*v.shape[:-1], 0, v.shape[-1]))
    return State(torch.stack(us, -2), torch.stack(ss, -2) if ss else empty, r, safe)


def col_scaling(s: Tensor, problem: Problem, tau: Tensor | None) -> Tensor:
    """`v` from the column sums `s`; 0 for empty columns."""
    v = problem.target / s
    if tau is not None:
        v = v.pow(tau[..., None])
    return torch.where(problem.cols, v, 0.0)


def col_excess(s: Tensor, problem: Problem) -> Tensor:
    """`LSE_i(C + f + log a) − log t` (..., m) from the column sums; 0 for empty columns."""
    return torch.where(problem.cols, s.log() - problem.log_target(), 0.0)


def scalings(state: State, problem: Problem, tau: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last `u` (..., n) and `v` (..., m)."""
    return state.rows[..., -1, :], _scaling_after(state.cols.shape[-2] - 1, state, problem, tau)


def _scaling_after(index: int, state: State, problem: Problem, tau: Tensor | None) -> Tensor:
    """`v` after a column step; before the first it is 1."""
    if index < 0:
        return torch.ones_like(problem.target)
    return col_scaling(state.cols[..., index, :], problem, tau)


class Adjoint(NamedTuple):
    """`A ∘ (xᵀ y)`, summed over the steps, is what they subtract from the gradient of the scores.

    A step is a row, which a compiler reads in vectors.
    """

    x: Tensor  # (..., n_iters, n)
    y: Tensor  # (..., n_iters, m)
    tau: Tensor | None  # (...)
    safe: Tensor  # (...) bool


def walk_back(
    kernel: Tensor,
    problem: Problem,
    tau: Tensor | None,
    definition: Definition,
    state: State,
    df: Tensor,
    dg: Tensor,
) -> Adjoint:
    """The adjoint of `iterate`, from the adjoints of the last potentials.

    Each step adds one rank-one term, so that the iterates are never needed as matrices.
    """
    xs, ys = [], []
    d_tau = torch.zeros_like(df[..., 0])
    for step in reversed(definition.steps()):
        u = state.rows[..., step.number, :]
        if step.rows:
            v = _scaling_after(step.number - 1, state, problem, tau)
            x, y = df * u, v
            if not step.is_first():
                dg = dg - v * apply(kernel.mT, x)
            df = torch.zeros_like(df)
        else:
            s = state.cols[..., step.number, :]
            x, y = u if problem.weight is None else u * problem.weight, torch.where(problem.cols, dg / s, 0.0)
            if tau is not None:
                d_tau = d_tau - (dg * col_excess(s, problem)).sum(-1)
                y = y * tau[..., None]
            df = df - x * apply(kernel, y)
            dg = torch.zeros_like(dg)
        xs.append(x)
        ys.append(y)
    x, y = torch.stack(xs, -2), torch.stack(ys, -2)
    # Where the kernel is zero the product of two large factors would still overflow: 0 · inf.
    largest = x.abs().amax((-2, -1)) * y.abs().amax((-2, -1)) * len(xs)
    return Adjoint(x, y, None if tau is None else d_tau, largest < torch.finfo(kernel.dtype).max / 4)


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """Batched matrix-vector product: (..., n, m) and (..., m) to (..., n).

    The vector stands on the left, as a matrix of one row: on the CPU torch's product is then 5 to 30 times as fast as
    with a matrix of one column on the right.
    """
    if vector.shape[-1] <= BLOCK:
        return (vector[..., None, :] @ matrix.mT)[..., 0, :]
    blocks = zip(matrix.split(BLOCK, -1), vector.split(BLOCK, -1), strict=True)
    return torch.stack([apply(*block) for block in blocks], -1).sum(-1)
