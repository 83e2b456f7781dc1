"""The energies F⁰ and F^∞ whose Wasserstein gradient flows T⁰ and T^∞ are, where `W_QᵀW_K = −W_V` is symmetric.

Both have gradients in the particles: `∂F/∂x_i = −w_i T(x_i)`. The gradient of F^∞ needs the potentials only: F^∞ is −½
times a maximum over potentials, so its gradient is that of the objective at fixed potentials (envelope theorem).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sinkformers.flows.maps import AttentionMap
from sinkformers.flows.measure import Measure
from sinkformers.flows.potentials import BLOCK_BYTES, blocks
from sinkformers.flows.projections import Cost, Projections, Scores


def energy_zero(measure: Measure, projections: Projections, *, eps: float = 1.0, cost: Cost = "dot") -> Tensor:
    """Return `F⁰(μ) = ½ ∫ exp(c/ε) d(μ⊗μ)`, a scalar with a gradient in the particles.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import Measure, Projections, energy_zero
        >>> float(energy_zero(Measure.uniform(torch.zeros(3, 2)), Projections.tied(torch.eye(2))))
        0.5
    """
    scores = AttentionMap(projections, eps=eps, cost=cost, n_iters=0).scores
    energy = (
        _pairwise(scores, measure, torch.zeros_like(measure.weights), torch.zeros_like(measure.weights), BLOCK_BYTES)
        / 2
    )
    if not energy.detach().isfinite():
        raise OverflowError("energy_zero: exp(scores) overflows; move the particles closer to 0 or increase eps.")
    return energy


def energy_infinity(
    measure: Measure,
    projections: Projections,
    *,
    eps: float = 1.0,
    cost: Cost = "dot",
    tol: float = 1e-11,
    max_iters: int = 1001,
) -> Tensor:
    """Return `F^∞(μ) = −½ ∫ k^∞ log(k^∞/k⁰) d(μ⊗μ)`, a scalar with a gradient in the particles.

    With cost "l2" and `W_Q = W_K` it decreases along the *recentred* map T̄^∞ as it does with "dot" along T^∞: the two
    energies differ by `(1/2ε) ∫ xᵀW_QᵀW_K x dμ`, the two maps by its gradient.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import Measure, Projections, energy_infinity
        >>> points = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> energy = energy_infinity(Measure.uniform(points), Projections.tied(torch.eye(1, dtype=torch.float64)))
        >>> round(float(energy), 6)  # ½ log cosh 1
        0.21689
    """
    field_map = AttentionMap(projections, eps=eps, cost=cost, n_iters=math.inf, tol=tol, max_iters=max_iters)
    measure = measure.support()
    with torch.no_grad():
        field = field_map(replace(measure, points=measure.points.detach()))
        f, g = field.row_potentials(field.measure.points), field.column_potential
    # −½ of the dual objective, whose error is of second order in that of the potentials.
    dual = measure.integrate(f + g) - _pairwise(field.scores, measure, f, g, field_map.max_bytes) + 1
    if field.scores.cost == cost and field.scores.query is projections.query:
        return -dual / 2
    # The limit was computed for scores that differ by terms of one point each; add the integrals of these terms.
    given = measure.integrate(field_map.scores.diagonal(measure.points))
    return (given - measure.integrate(field.scores.diagonal(measure.points)) - dual) / 2


def _pairwise(scores: Scores, measure: Measure, f: Tensor, g: Tensor, max_bytes: int) -> Tensor:
    """Return `∫ exp(C + f + g) d(μ⊗μ)`."""
    x, weights = measure.points, measure.weights
    total = x.new_zeros(())
    for rows in blocks(len(x), len(x) * x.element_size(), max_bytes):
        kernel = (scores(x[rows], x) + f[rows, None] + g).exp()
        total = total + weights[rows] @ kernel @ weights
    return total
