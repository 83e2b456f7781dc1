"""Ten dimensions: closed forms converge as in one dimension; samples stop being informative at much larger ε."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sinkformers.flows import (
    AttentionMap,
    Gaussian,
    Projections,
    sinkformer_limit,
    sinkhorn_of_gaussian,
    softmax_of_gaussian,
    transformer_limit,
)
from sinkformers.lab.theory.sweep import Sweep, sweep


@dataclass(frozen=True)
class HighDimension:
    dim: int
    by_eps: Sweep
    by_samples: Sweep
    blind_from: float | None  # largest ε at which the largest sample has at least 0.9 of the error of the zero map


def run(*, dim: int, eps: Sequence[float], sample_eps: Sequence[float], samples: Sequence[int]) -> HighDimension:
    """Compare closed forms with their limits at `eps`, and samples with the closed form at `sample_eps`."""
    generator = torch.Generator().manual_seed(dim)
    spread = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    density = Gaussian.centred(spread @ spread.mT / dim + torch.eye(dim, dtype=torch.float64) / 2)
    projections = Projections.tied(torch.eye(dim, dtype=torch.float64))
    by_samples = _by_samples(density, projections, sample_eps, samples)
    last = by_samples.columns[-1]
    blind = [float(row[0]) for row, error in zip(by_samples.rows, by_samples.column(last), strict=True) if error > 0.9]
    return HighDimension(dim, _by_eps(density, projections, eps), by_samples, max(blind, default=None))


def _by_eps(density: Gaussian, projections: Projections, widths: Sequence[float]) -> Sweep:
    places = density.sample(512, torch.Generator().manual_seed(1))
    sinkhorn = sinkformer_limit(projections)(places.points, density.score)
    softmax = transformer_limit(projections)(places.points, density.score)
    rows = []
    for eps in widths:
        closed = sinkhorn_of_gaussian(density, projections, eps=eps, recentred=True)(places.points)
        beside = softmax_of_gaussian(density, projections, eps=eps, recentred=True)(places.points)
        rows.append(
            (
                eps,
                places.norm(closed - sinkhorn) / places.norm(sinkhorn),
                places.norm(beside - softmax) / places.norm(softmax),
            )
        )
    title = f"A Gaussian in {density.dim} dimensions: closed form against limit"
    return sweep(title, "L²(μ), relative", ("ε", "Sinkhorn", "SoftMax"), rows, fitted=("Sinkhorn", "SoftMax"))


def _by_samples(density: Gaussian, projections: Projections, widths: Sequence[float], samples: Sequence[int]) -> Sweep:
    rows = []
    for eps in widths:
        closed = sinkhorn_of_gaussian(density, projections, eps=eps, recentred=True)
        row = [eps]
        for n in samples:
            measure = density.sample(n, torch.Generator().manual_seed(n))
            values = AttentionMap(projections, eps=eps, recentred=True)(measure)(measure.points)
            row.append(measure.norm(values - closed(measure.points)) / measure.norm(closed(measure.points)))
        rows.append(row)
    title = f"T̄^∞ of random samples in {density.dim} dimensions, at their particles, against the closed form at that ε"
    return sweep(
        title, "L² over the sample, relative; 1 is what T̄ = 0 errs", ("ε", *(f"n = {n}" for n in samples)), rows
    )
