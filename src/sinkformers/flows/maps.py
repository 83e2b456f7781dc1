"""The maps T⁰, T¹, T^l and T^∞ of a measure, at its particles and at other points."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers.core import checks as core_checks
from sinkformers.flows import checks
from sinkformers.flows.measure import Measure
from sinkformers.flows.potentials import Evidence, averaged, by_blocks, limit, row_step, steps
from sinkformers.flows.projections import Cost, Projections, Scores

EXACT = Evidence(0, 0.0, True)
RUNAWAY = (
    "The particles diverge (as they do in a raw flow with W_V of the sign of W_QᵀW_K): stop earlier, or use "
    "recentred=True."
)


@dataclass(frozen=True, eq=False)
class Field:
    """The vector field `T_μ` of a fixed measure.

    Calling it returns `T_μ(x)` (m, d) at points (m, d), the particles or others; the gradient in these points is that
    of the field. `evidence` describes the convergence of the normalisation.
    """

    measure: Measure
    scores: Scores
    value: Tensor
    row_potential: Tensor | None
    """Column potentials before the last row step; None for T⁰, which has none."""
    column_potential: Tensor
    centre: Tensor | None
    evidence: Evidence
    max_bytes: int

    def __call__(self, points: Tensor) -> Tensor:
        core_checks.one_device("Field", "measure.points", self.measure.points, points=points)
        checks.points("Field", "points", points)
        result = points.new_empty(len(points), len(self.value))
        return by_blocks(lambda rows: self._at(points[rows]), result, len(self.measure), self.max_bytes)

    def row_potentials(self, points: Tensor) -> Tensor:
        """Return `f(x)` (m,): minus the logarithm of the sum that the last row step divides by."""
        if self.row_potential is None:
            return points.new_zeros(len(points))
        return row_step(self.scores, self.measure, self.row_potential, points, self.max_bytes)

    def _at(self, points: Tensor) -> Tensor:
        keys, weights = self.measure.points, self.measure.weights
        scores = self.scores(points, keys) + self.column_potential + weights.log()
        if self.row_potential is self.column_potential:
            kernel = scores.softmax(-1)  # the last step is a row step: sums are exact
        else:
            kernel = (scores + self.row_potentials(points)[:, None]).exp()
        means = kernel @ keys
        if self.centre is not None:
            means = means - points @ self.centre.mT
        values = means @ self.value.mT / self.scores.eps
        if not values.detach().isfinite().all():
            raise OverflowError(self._message(points, scores))
        return values

    def _message(self, points: Tensor, scores: Tensor) -> str:
        if self.row_potential is None:
            return (
                f"Field: exp(scores) overflows; the largest score is {scores.max().item():.3g}. T⁰ does not normalise: "
                "move the particles closer to the origin, increase eps, or use n_iters ≥ 1."
            )
        return f"Field: the map overflows; the norm of the farthest point is {points.norm(dim=-1).max():.3g}. {RUNAWAY}"


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """`T_μ(x) = (1/ε) ∫ k(x, x') W_V x' dμ(x')`, with `k = exp(c/ε)` normalised `n_iters` times.

    0 is T⁰, 1 is T¹ (SoftMax, a Transformer), `math.inf` is T^∞ (Sinkhorn's limit, a Sinkformer). The cost is "dot",
    `c = (W_Q x)ᵀW_K x'`, or "l2", `c = −½|W_Q x − W_K x'|²`; T^∞ is the same for both.

    Args:
        recentred: return T̄ instead, which has a limit as ε → 0: `T − (1/ε) W_V W_K⁻¹W_Q x` for n_iters = 1 (the paper's
            Proposition 4, cost "l2"), `T − (1/ε) W_V x` for more (Theorem 1).
        tol, max_iters: of T^∞. If `W_QᵀW_K` is symmetric positive semi-definite it makes averaged updates, about 35 for
            any ε; otherwise it takes Newton's method, and `max_iters` counts products with the kernel. `Field.evidence`
            has the error that was reached.
        max_bytes: T^∞ keeps its kernel (n, n) if it fits into this many bytes, and recomputes it per pass otherwise.
            Newton's method needs six such matrices; where they do not fit, T^∞ alternates.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import AttentionMap, Measure, Projections
        >>> measure = Measure.uniform(torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64))
        >>> field = AttentionMap(Projections.tied(torch.eye(1, dtype=torch.float64)))(measure)
        >>> field(measure.points).squeeze(1).round(decimals=4).tolist(), field.evidence.converged
        ([0.5326, 0.0, -0.5326], True)
    """

    projections: Projections
    eps: float = 1.0
    cost: Cost = "dot"
    n_iters: int | float = math.inf
    recentred: bool = False
    tol: float = 1e-11
    max_iters: int = 1001
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        caller = "AttentionMap"
        core_checks.positive(caller, "eps", self.eps)
        core_checks.column_tolerance(caller, self.tol)
        core_checks.one_of(caller, "cost", self.cost, ("dot", "l2"))
        core_checks.most_iterations(caller, self.max_iters)
        if self.n_iters != math.inf and not (isinstance(self.n_iters, int) and self.n_iters >= 0):
            raise ValueError(
                f"{caller}: n_iters must be a whole number ≥ 0 (0 is T⁰, 1 is SoftMax) or math.inf (Sinkhorn's limit); "
                f"got {self.n_iters!r}."
            )
        if self.recentred and self.n_iters == 0:
            raise ValueError(f"{caller}: T⁰ has no recentred map, its kernel is not normalised; use n_iters ≥ 1.")
        if self.recentred and self.n_iters == 1:
            if self.cost != "l2":
                raise ValueError(
                    f'{caller}: the recentred T¹ needs cost="l2"; got {self.cost!r}. With dot products, '
                    "SoftMax may have no limit as eps falls."
                )
            checks.invertible(caller, "W_K", self.projections.key)

    def __call__(self, measure: Measure) -> Field:
        """Return the field of `measure`; it has a gradient in the points where it is evaluated, not in the measure."""
        self._check(measure)
        scores, support = self.scores, measure.support()
        if self.n_iters == math.inf:
            root = self.projections.root()
            if root is None:
                g, evidence = limit(scores, support, self.tol, self.max_iters, self.max_bytes)
            else:
                scores = Scores(root, root, self.eps, "l2")
                g, evidence = averaged(scores, support, self.tol, self.max_iters, self.max_bytes)
            return self._field(support, scores, g, g, evidence)
        if self.n_iters == 0:
            return self._field(support, scores, None, torch.zeros_like(support.weights), EXACT)
        before, after = steps(scores, support, int(self.n_iters), self.max_bytes)
        return self._field(support, scores, before, after, EXACT._replace(iterations=int(self.n_iters)))

    @property
    def scores(self) -> Scores:
        return Scores(self.projections.query, self.projections.key, self.eps, self.cost)

    def _field(
        self, measure: Measure, scores: Scores, before: Tensor | None, after: Tensor, evidence: Evidence
    ) -> Field:
        centre = self._centre() if self.recentred else None
        return Field(measure, scores, self.projections.value, before, after, centre, evidence, self.max_bytes)

    def _centre(self) -> Tensor:
        if self.n_iters == 1:
            return torch.linalg.solve(self.projections.key, self.projections.query)
        return torch.eye(self.projections.dim, dtype=self.projections.value.dtype)

    def _check(self, measure: Measure) -> None:
        query, points = self.projections.query, measure.points
        core_checks.one_device("AttentionMap", "measure.points", points, projections=query)
        if measure.dim != self.projections.dim or points.dtype != query.dtype:
            raise ValueError(
                f"AttentionMap: projections act on {self.projections.dim} coordinates in {query.dtype}; the measure "
                f"has {measure.dim} in {points.dtype}."
            )
        if points.requires_grad:
            raise ValueError(
                "AttentionMap: the points of a measure get no gradient, since a field belongs to a fixed measure. Pass "
                "points.detach(); energies have gradients in the particles, and so has sinkformers.sinkhorn."
            )
        reach = (points @ query.mT).norm(dim=-1).max() * (points @ self.projections.key.mT).norm(dim=-1).max()
        if not reach / self.eps < torch.finfo(points.dtype).max / 8:
            far = int(points.norm(dim=-1).argmax())
            raise OverflowError(
                f"AttentionMap: scores overflow; particle {far} is at {points[far].tolist()}. {RUNAWAY}"
            )
