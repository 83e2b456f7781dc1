"""Theorem 1: T̄^∞ tends to `½ W_V (W_QᵀW_K)⁻¹ ∇ρ/ρ` as ε falls; the paper states it without the ½.

SoftMax with the cost "l2" is compared: for `W_Q = W_K` its T̄¹ tends to twice that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sinkformers.flows import (
    AttentionMap,
    Bump,
    Density,
    Gaussian,
    Measure,
    Projections,
    paper_sinkformer_limit,
    sinkformer_limit,
    sinkhorn_of_gaussian,
    transformer_limit,
)
from sinkformers.lab.theory.sweep import Sweep, constant, extrapolated, inside, sweep

WITHIN = 0.6  # "inside" is the box [−0.6, 0.6]^d of the support [−1, 1]^d


@dataclass(frozen=True)
class Theorem1:
    constant: float  # extrapolated to ε = 0, by quadrature inside the support
    constant_of_gaussian: float  # extrapolated to ε = 0, by quadrature of a Gaussian
    constants: Sweep
    by_eps: tuple[Sweep, ...]
    by_particles: tuple[Sweep, ...]


def run(
    *,
    per_axis: tuple[int, int],
    eps: tuple[Sequence[float], Sequence[float]],
    sample_eps: float,
    samples: Sequence[int],
    repeats: int,
) -> Theorem1:
    """Compute errors in 1-D and 2-D, with `per_axis` quadrature points per axis and with samples at `sample_eps`."""
    one = torch.eye(1, dtype=torch.float64)
    lines = Bump(4, 1).quadrature(per_axis[0])
    constants = _constants(lines, Bump(4, 1), eps[0])
    normal = Gaussian.centred(one / 4)
    of_gaussian = _constants(normal.quadrature(per_axis[0]), normal, eps[0])
    turn = torch.tensor([[0.4, -1.0], [0.7, 0.3]], dtype=torch.float64)
    skew = torch.tensor([[1.0, 0.3], [0.0, 0.8]], dtype=torch.float64)
    flat = Bump(4, 2).quadrature(per_axis[1])
    by_eps = (
        errors("(1 − x²)⁴ on [−1, 1]", Bump(4, 1), lines, Projections.tied(one), eps[0]),
        errors("the same in two dimensions", Bump(4, 2), flat, Projections.tied(skew), eps[1]),
        errors("in two dimensions, W_V unrelated to W_QᵀW_K", Bump(4, 2), flat, Projections(skew, skew, turn), eps[1]),
        _against_closed_form(eps[1], per_axis[1]),
    )
    by_particles = (
        _quadrature_error(1, sample_eps, per_axis[0]),
        _sample_error(1, sample_eps, per_axis[0], samples, repeats),
        _sample_error(2, sample_eps, per_axis[1], samples, repeats),
    )
    widths = list(eps[0])[-4:]
    return Theorem1(
        extrapolated(widths, constants.column("Sinkhorn")[-4:]),
        extrapolated(widths, of_gaussian.column("Sinkhorn")[-4:]),
        constants,
        by_eps,
        by_particles,
    )


def recentred(projections: Projections, eps: float) -> dict[str, AttentionMap]:
    """Return T̄^∞ and T̄¹."""
    return {
        "Sinkhorn": AttentionMap(projections, eps=eps, recentred=True),
        "SoftMax": AttentionMap(projections, eps=eps, cost="l2", n_iters=1, recentred=True),
    }


def _constants(measure: Measure, density: Density, widths: Sequence[float]) -> Sweep:
    part, projections = inside(measure, WITHIN), Projections.tied(torch.eye(measure.dim, dtype=torch.float64))
    target = -density.score(part.points)
    rows = []
    for eps in widths:
        fields = [attention(measure)(part.points) for attention in recentred(projections, eps).values()]
        rows.append((eps, *(constant(part, values, target) for values in fields)))
    return sweep(
        "The constant c in T̄ ≈ −c ∇ρ/ρ",
        f"best fit in L²(μ) within {WITHIN} of the origin",
        ("ε", "Sinkhorn", "SoftMax"),
        rows,
    )


def errors(name: str, density: Density, measure: Measure, projections: Projections, widths: Sequence[float]) -> Sweep:
    """Compute errors of both maps against their limits, on the whole support and inside, and the paper's limit."""
    part = inside(measure, WITHIN)
    limits = {"Sinkhorn": sinkformer_limit(projections), "SoftMax": transformer_limit(projections)}
    paper = paper_sinkformer_limit(projections)(part.points, density.score)
    rows = []
    for eps in widths:
        row = [eps]
        for arm, attention in recentred(projections, eps).items():
            field = attention(measure)
            values = field(part.points)
            row += [
                measure.norm(field(measure.points) - limits[arm](measure.points, density.score)),
                part.norm(values - limits[arm](part.points, density.score)),
            ]
            if arm == "Sinkhorn":
                row.append(part.norm(values - paper))
        rows.append(row)
    columns = ("ε", "Sinkhorn", "Sinkhorn inside", "Sinkhorn inside, paper's limit", "SoftMax", "SoftMax inside")
    fitted = [column for column in columns[1:] if "paper" not in column]
    title = f"Distance of T̄ from its limit: {name}, {len(measure)} particles"
    return sweep(title, f"L²(μ); inside: within {WITHIN} of the origin", columns, rows, fitted=fitted)


def _against_closed_form(widths: Sequence[float], per_axis: int) -> Sweep:
    """Compare, for a Gaussian in the plane, quadrature with the closed form and the closed form with the limit."""
    covariance = torch.tensor([[1.0, 0.3], [0.3, 0.6]], dtype=torch.float64)
    density, projections = Gaussian.centred(covariance), Projections.tied(torch.eye(2, dtype=torch.float64))
    measure = density.quadrature(per_axis)
    limit = sinkformer_limit(projections)(measure.points, density.score)
    rows = []
    for eps in (10 * value for value in widths):
        closed = sinkhorn_of_gaussian(density, projections, eps=eps, recentred=True)(measure.points)
        found = AttentionMap(projections, eps=eps, recentred=True)(measure)(measure.points)
        rows.append((eps, measure.norm(found - closed), measure.norm(closed - limit)))
    columns = ("ε", "quadrature − closed form", "closed form − limit")
    title = "A Gaussian in the plane: Sinkhorn's T̄ three ways"
    return sweep(title, "L²(μ)", columns, rows, fitted=columns[2:])


def _quadrature_error(dim: int, eps: float, finest: int) -> Sweep:
    density, places = Bump(4, dim), inside(Bump(4, dim).quadrature(17), WITHIN)
    maps = recentred(Projections.tied(torch.eye(dim, dtype=torch.float64)), eps)
    truth = {arm: attention(density.quadrature(finest))(places.points) for arm, attention in maps.items()}
    rows = []
    for per_axis in (8, 12, 16, 24, 32, 48, 64):
        measure = density.quadrature(per_axis)
        gaps = (places.norm(attention(measure)(places.points) - truth[arm]) for arm, attention in maps.items())
        rows.append((per_axis**dim, *gaps))
    title = f"Particles on a grid, {dim}-D, ε = {eps}: distance from {finest**dim} particles"
    return sweep(title, f"L²(μ) within {WITHIN} of the origin", ("n", *maps), rows)


def _sample_error(dim: int, eps: float, finest: int, samples: Sequence[int], repeats: int) -> Sweep:
    density, places = Bump(4, dim), inside(Bump(4, dim).quadrature(17), WITHIN)
    maps = recentred(Projections.tied(torch.eye(dim, dtype=torch.float64)), eps)
    truth = {arm: attention(density.quadrature(finest))(places.points) for arm, attention in maps.items()}
    rows = []
    for n in samples:
        squares = dict.fromkeys(maps, 0.0)
        for seed in range(repeats):
            measure = density.sample(n, torch.Generator().manual_seed(1000 * seed + n))
            for arm, attention in maps.items():
                squares[arm] += places.norm(attention(measure)(places.points) - truth[arm]) ** 2 / repeats
        rows.append((n, *(math.sqrt(square) for square in squares.values())))
    title = f"Random samples, {dim}-D, ε = {eps}: distance from quadrature at the same ε"
    norm = f"L²(μ) within {WITHIN} of the origin, root mean square over {repeats} samples"
    return sweep(title, norm, ("n", *maps), rows, fitted=list(maps))
