"""Sinkhorn's algorithm between a measure and itself, in blocks of rows.

With weights `w` and scores `C` the steps are `f_i = −log Σ_j w_j exp(C_ij + g_j)` and
`g_j = −log Σ_i w_i exp(C_ij + f_i)`, from `g = 0`. The potentials extend to any point:
`f(x) = −log Σ_j w_j exp(C(x, x_j) + g_j)`.

Where scores are symmetric and positive semi-definite, `f = g` in the limit, and the *averaged* update
`f ← ½(f + step(f))` at least halves its error: the derivative of a step is −P, with P's eigenvalues in [0, 1], so that
of the average is ½(1 − P). Alternating contracts only by the square of P's second eigenvalue, which tends to 1 as ε
falls.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core.limit_solver import converge
from sinkformers.core.problem import pose
from sinkformers.flows.measure import Measure
from sinkformers.flows.projections import Scores

BLOCK_BYTES = 2**23  # largest size of a temporary block of scores
SOLVER_MATRICES = 6  # (n, n) that Newton's method holds at once: scores, kernel, weights, and parts of a step


class Evidence(NamedTuple):
    """The convergence of an iteration."""

    iterations: int
    """Number of steps: normalisations, or averaged updates."""
    residual: float
    """The largest relative error of a column sum after the last step, which normalises rows."""
    converged: bool
    """Whether the residual is within the tolerance."""


def blocks(n: int, row_bytes: int, max_bytes: int) -> Iterator[slice]:
    """Yield slices that cover `range(n)`, with as many rows as fit into `max_bytes` and `BLOCK_BYTES`, at least one."""
    height = max(1, min(max_bytes, BLOCK_BYTES) // row_bytes)
    for first in range(0, n, height):
        yield slice(first, min(n, first + height))


def by_blocks(make: Callable[[slice], Tensor], result: Tensor, m: int, max_bytes: int) -> Tensor:
    """Fill `result` (n, …) with `make(rows)` for blocks of rows, where `make` computes scores of `m` columns.

    A list of results, in contrast, would keep the memory of every block alive.
    """
    for rows in blocks(len(result), m * result.element_size(), max_bytes):
        result[rows] = make(rows)
    return result


def row_step(scores: Scores, measure: Measure, g: Tensor, x: Tensor, max_bytes: int) -> Tensor:
    """Return `f(x) = −log Σ_j w_j exp(C(x, x_j) + g_j)` at points (m, d)."""
    shift = g + measure.weights.log()

    def make(rows: slice) -> Tensor:
        return -(scores(x[rows], measure.points) + shift).logsumexp(-1)

    return by_blocks(make, x.new_empty(len(x)), len(measure), max_bytes)


def column_step(scores: Scores, measure: Measure, f: Tensor, max_bytes: int) -> Tensor:
    """Return `g(x_j) = −log Σ_i w_i exp(C(x_i, x_j) + f_i)` at the particles."""
    shift = (f + measure.weights.log())[:, None]

    def make(columns: slice) -> Tensor:
        return -(scores(measure.points, measure.points[columns]) + shift).logsumexp(0)

    return by_blocks(make, f.new_empty(len(measure)), len(measure), max_bytes)


def steps(scores: Scores, measure: Measure, n_iters: int, max_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the column potentials before the last row step and after the last step of `n_iters` ≥ 1 steps."""
    before = after = torch.zeros_like(measure.weights)
    for _ in range(n_iters // 2):
        f = row_step(scores, measure, after, measure.points, max_bytes)
        before, after = after, column_step(scores, measure, f, max_bytes)
    return (after if n_iters % 2 else before), after


def limit(scores: Scores, measure: Measure, tol: float, max_iters: int, max_bytes: int) -> tuple[Tensor, Evidence]:
    """Return column potentials whose column sums are within `tol`, for any scores, and evidence.

    Newton's method finds them if its matrices fit into `max_bytes`, alternating steps by blocks of rows otherwise.
    """
    if SOLVER_MATRICES * len(measure) ** 2 * measure.points.element_size() > max_bytes:
        return alternating(scores, measure, tol, max_iters, max_bytes)
    mass = measure.weights[None]
    problem = pose(scores(measure.points, measure.points)[None], None, mass, mass)
    problem, goal = problem._replace(scores=problem.shifted()), mass.new_tensor([_reachable(tol, measure)])
    found = converge(problem, None, goal, max_iters, newton=True, bounds_weights=False)
    return found.g[0], Evidence(int(found.iterations), found.residual.item(), bool(found.converged))


def alternating(
    scores: Scores, measure: Measure, tol: float, max_iters: int, max_bytes: int
) -> tuple[Tensor, Evidence]:
    """Alternate row and column steps until column sums are within `tol`; return column potentials and evidence."""
    tol = _reachable(tol, measure)
    g, taken = torch.zeros_like(measure.weights), 1
    while True:
        f = row_step(scores, measure, g, measure.points, max_bytes)
        new = column_step(scores, measure, f, max_bytes)
        residual = (g - new).expm1().abs().max().item()
        if residual <= tol or taken + 2 > max_iters or math.isnan(residual):
            return g, Evidence(taken, residual, residual <= tol)
        g, taken = new, taken + 2


def averaged(scores: Scores, measure: Measure, tol: float, max_iters: int, max_bytes: int) -> tuple[Tensor, Evidence]:
    """Make averaged updates, for scores that are symmetric, positive semi-definite and 0 on the diagonal.

    They use exp(C) itself: no entry exceeds 1 and each row contains a 1, so that no sum vanishes. The kernel is kept if
    it fits into `max_bytes`, and recomputed block by block in each pass otherwise.
    """
    tol = _reachable(tol, measure)
    kernel = _Kernel(scores, measure.points, max_bytes)
    weights = measure.weights
    u, taken = kernel.apply(weights).rsqrt(), 0
    while True:
        step = kernel.apply(weights * u)  # a row step would replace u by 1/step
        residual = (u * step - 1).abs().max().item()
        if residual <= tol or taken + 1 > max_iters or math.isnan(residual):
            break
        u, taken = (u / step).sqrt(), taken + 1
    columns = u * kernel.apply(weights / step)  # the column sums after the final row step
    residual = (columns - 1).abs().max().item()
    return u.log(), Evidence(taken + 1, residual, residual <= tol)


class _Kernel:
    """Products of `exp(C)` (n, n) with vectors."""

    def __init__(self, scores: Scores, points: Tensor, max_bytes: int) -> None:
        self.scores, self.points = scores, points
        self.max_bytes, n = max_bytes, len(points)
        fits = n * n * points.element_size() <= max_bytes
        self.kept = by_blocks(self._block, points.new_empty(n, n), n, max_bytes) if fits else None

    def _block(self, rows: slice) -> Tensor:
        # Squared distances are not negative, but rounding can make them so.
        return self.scores(self.points[rows], self.points).clamp_max_(0.0).exp_()

    def apply(self, vector: Tensor) -> Tensor:
        if self.kept is not None:
            return self.kept @ vector
        result = torch.empty_like(vector)
        return by_blocks(lambda rows: self._block(rows) @ vector, result, len(vector), self.max_bytes)


def _reachable(tol: float, measure: Measure) -> float:
    """Return the tolerance, or the rounding error of a sum if that is larger."""
    return max(tol, 4 * torch.finfo(measure.weights.dtype).eps * len(measure) ** 0.5)
