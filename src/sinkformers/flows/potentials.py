"""Sinkhorn's algorithm between a measure and itself, in blocks of rows.

With weights `w` and scores `C` the steps are `f_i = −log Σ_j w_j exp(C_ij + g_j)` and
`g_j = −log Σ_i w_i exp(C_ij + f_i)`, from `g = 0`. The potentials extend to any point:
`f(x) = −log Σ_j w_j exp(C(x, x_j) + g_j)`.

Where scores are symmetric and positive semi-definite, `f = g` in the limit, and the *averaged* update
`f ← ½(f + step(f))` halves its error at least: the derivative of a step is −P, with P's eigenvalues in [0, 1], so that
of the average is ½(1 − P). Alternating contracts only by the square of P's second eigenvalue, which tends to 1 as ε
falls.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.flows.measure import Measure
from sinkformers.flows.projections import Scores

BLOCK_BYTES = 2**23  # of scores that are made, used and forgotten


class Evidence(NamedTuple):
    """How a limit was reached."""

    iterations: int
    """Steps taken: normalisations, or averaged updates."""
    residual: float
    """The largest relative error of a column's marginal after the last step, which is over rows."""
    converged: bool
    """Whether the residual is within the tolerance."""


def blocks(n: int, row_bytes: int, max_bytes: int) -> Iterator[slice]:
    """Slices that cover `range(n)`, each of as many rows as `max_bytes` and `BLOCK_BYTES` hold, one at least."""
    height = max(1, min(max_bytes, BLOCK_BYTES) // row_bytes)
    for first in range(0, n, height):
        yield slice(first, min(n, first + height))


def by_blocks(make: Callable[[slice], Tensor], result: Tensor, m: int, max_bytes: int) -> Tensor:
    """Fill `result` (n, …) with what `make` gives for each slice of rows, scores of `m` columns being made on the way.

    Results that were kept one by one would each pin the memory of their block.
    """
    for rows in blocks(len(result), m * result.element_size(), max_bytes):
        result[rows] = make(rows)
    return result


def row_step(scores: Scores, measure: Measure, g: Tensor, x: Tensor, max_bytes: int) -> Tensor:
    """`f(x) = −log Σ_j w_j exp(C(x, x_j) + g_j)` at points (m, d)."""
    shift = g + measure.weights.log()

    def make(rows: slice) -> Tensor:
        return -(scores(x[rows], measure.points) + shift).logsumexp(-1)

    return by_blocks(make, x.new_empty(len(x)), len(measure), max_bytes)


def column_step(scores: Scores, measure: Measure, f: Tensor, max_bytes: int) -> Tensor:
    """`g(x_j) = −log Σ_i w_i exp(C(x_i, x_j) + f_i)` at the particles."""
    shift = (f + measure.weights.log())[:, None]

    def make(columns: slice) -> Tensor:
        return -(scores(measure.points, measure.points[columns]) + shift).logsumexp(0)

    return by_blocks(make, f.new_empty(len(measure)), len(measure), max_bytes)


def steps(scores: Scores, measure: Measure, n_iters: int, max_bytes: int) -> tuple[Tensor, Tensor]:
    """The column potentials before the last row step, and after the last step, of `n_iters` ≥ 1 normalisations."""
    before = after = torch.zeros_like(measure.weights)
    for _ in range(n_iters // 2):
        f = row_step(scores, measure, after, measure.points, max_bytes)
        before, after = after, column_step(scores, measure, f, max_bytes)
    return (after if n_iters % 2 else before), after


def alternating(
    scores: Scores, measure: Measure, tol: float, max_iters: int, max_bytes: int
) -> tuple[Tensor, Evidence]:
    """Row and column steps until the columns' marginals hold after a row step; column potentials and evidence."""
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
    """The averaged update for scores that are symmetric, positive semi-definite and 0 on the diagonal.

    It runs in the kernel domain: no entry of exp(C) exceeds 1 and each row has its 1, so that no sum vanishes. The
    kernel is kept where `max_bytes` hold it, and made anew, block by block, in each pass where they do not.
    """
    tol = _reachable(tol, measure)
    kernel = _Kernel(scores, measure.points, max_bytes)
    weights = measure.weights
    u, taken = kernel.apply(weights).rsqrt(), 0
    while True:
        step = kernel.apply(weights * u)  # 1/step is what a row step would make of u
        residual = (u * step - 1).abs().max().item()
        if residual <= tol or taken + 1 > max_iters or math.isnan(residual):
            break
        u, taken = (u / step).sqrt(), taken + 1
    columns = u * kernel.apply(weights / step)  # the marginals after the row step that ends it
    residual = (columns - 1).abs().max().item()
    return u.log(), Evidence(taken + 1, residual, residual <= tol)


class _Kernel:
    """`exp(C)` (n, n) as it meets vectors."""

    def __init__(self, scores: Scores, points: Tensor, max_bytes: int) -> None:
        self.scores, self.points = scores, points
        self.max_bytes, n = max_bytes, len(points)
        fits = n * n * points.element_size() <= max_bytes
        self.kept = by_blocks(self._block, points.new_empty(n, n), n, max_bytes) if fits else None

    def _block(self, rows: slice) -> Tensor:
        # A distance is never negative, whatever its rounding says.
        return self.scores(self.points[rows], self.points).clamp_max_(0.0).exp_()

    def apply(self, vector: Tensor) -> Tensor:
        if self.kept is not None:
            return self.kept @ vector
        result = torch.empty_like(vector)
        return by_blocks(lambda rows: self._block(rows) @ vector, result, len(vector), self.max_bytes)


def _reachable(tol: float, measure: Measure) -> float:
    """No tolerance below what the rounding of a sum leaves."""
    return max(tol, 4 * torch.finfo(measure.weights.dtype).eps * len(measure) ** 0.5)
