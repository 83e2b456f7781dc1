"""Proposition 4: T̄¹ with the cost "l2" tends to `W_V W_K⁻¹W_K⁻ᵀ (∇ρ/ρ)(W_K⁻¹W_Q x)`; the paper has W_K⁻¹ for W_K⁻ᵀ.

In one dimension, and for a symmetric W_K, the two are equal: the vectors here use a W_K that is not symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers.flows import (
    AttentionMap,
    Bump,
    Gaussian,
    Measure,
    Projections,
    paper_transformer_limit,
    softmax_of_gaussian,
    transformer_limit,
)
from sinkformers.lab.theory.sweep import Sweep, inside, sweep

W_QUERY = ((0.9, 0.1), (0.2, 1.1))
W_KEY = ((1.0, 0.8), (-0.3, 0.9))
MEAN, COVARIANCE = (0.2, -0.5), ((0.6, 0.2), (0.2, 0.3))
PLACE = (0.7, -1.1)
WITHIN = 0.25  # W_K⁻¹W_Q x must stay well inside the support


@dataclass(frozen=True)
class Proposition4:
    eps: float
    measured: tuple[float, ...]  # SoftMax on a grid around W_K⁻¹W_Q x
    closed_form: tuple[float, ...]
    limit: tuple[float, ...]
    paper: tuple[float, ...]
    by_eps: tuple[Sweep, ...]


def run(*, eps: float, local: int, per_axis: tuple[int, int], widths: tuple[Sequence[float], ...]) -> Proposition4:
    """Compute the vectors at `eps` with `local`² quadrature points, and errors by ε in one and two dimensions."""
    query, key = (torch.tensor(matrix, dtype=torch.float64) for matrix in (W_QUERY, W_KEY))
    density = Gaussian(torch.tensor(MEAN, dtype=torch.float64), torch.tensor(COVARIANCE, dtype=torch.float64))
    projections, place = Projections.tied(query, key), torch.tensor([PLACE], dtype=torch.float64)
    attention = AttentionMap(projections, eps=eps, cost="l2", n_iters=1, recentred=True)
    measured = attention(_around(density, projections, place, eps, local))(place)
    turn = torch.tensor([[0.4, -1.0], [0.7, 0.3]], dtype=torch.float64)
    in_line = Projections.tied(0.8 * torch.eye(1, dtype=torch.float64), 1.1 * torch.eye(1, dtype=torch.float64))
    return Proposition4(
        eps,
        _plain(measured),
        _plain(softmax_of_gaussian(density, projections, eps=eps, recentred=True)(place)),
        _plain(transformer_limit(projections)(place, density.score)),
        _plain(paper_transformer_limit(projections)(place, density.score)),
        (
            _errors("(1 − x²)⁴ on [−1, 1], W_Q = 0.8, W_K = 1.1", Bump(4, 1), in_line, per_axis[0], widths[0]),
            _errors("in two dimensions, W_K not symmetric", Bump(4, 2), projections, per_axis[1], widths[1]),
            _errors(
                "in two dimensions, W_V unrelated to W_QᵀW_K",
                Bump(4, 2),
                Projections(query, key, turn),
                per_axis[1],
                widths[1],
            ),
        ),
    )


def _around(density: Gaussian, projections: Projections, place: Tensor, eps: float, count: int) -> Measure:
    """Return quadrature around W_K⁻¹W_Q x, where SoftMax is a Gaussian of covariance `ε (W_KᵀW_K)⁻¹`."""
    inverse = torch.linalg.inv(projections.key)
    local = Gaussian(place[0] @ (inverse @ projections.query).mT, eps * inverse @ inverse.mT)
    points = local.quadrature(count).points
    return Measure(points, density.log(points).softmax(0))


def _errors(name: str, density: Bump, projections: Projections, per_axis: int, widths: Sequence[float]) -> Sweep:
    measure = density.quadrature(per_axis)
    part = inside(measure, WITHIN)
    limit, paper = (
        make(projections)(part.points, density.score) for make in (transformer_limit, paper_transformer_limit)
    )
    rows = []
    for eps in widths:
        attention = AttentionMap(projections, eps=eps, cost="l2", n_iters=1, recentred=True)
        values = attention(measure)(part.points)
        rows.append((eps, part.norm(values - limit), part.norm(values - paper)))
    columns = ("ε", "limit", "the paper's limit")
    title = f"Distance of T̄¹ from its limit: {name}, {len(measure)} particles"
    return sweep(title, f"L²(μ) within {WITHIN} of the origin", columns, rows, fitted=columns[1:2])


def _plain(vector: Tensor) -> tuple[float, ...]:
    return tuple(vector.flatten().tolist())
