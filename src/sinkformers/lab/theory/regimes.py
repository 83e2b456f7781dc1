"""Aggregation or diffusion: the effect of the sign of W_V and of recentring on a cloud of particles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sinkformers.flows import AttentionMap, Gaussian, Measure, Projections, energy_infinity, flow
from sinkformers.lab.theory.sweep import Sweep, sweep

VARIANCE = 1.0


@dataclass(frozen=True)
class Regimes:
    spread: Sweep
    contraction: Sweep  # F^∞ along the raw flow


def run(*, per_axis: int, eps: float, times: Sequence[float], contraction_times: Sequence[float]) -> Regimes:
    """Compute the flow of a Gaussian of variance 1 in the plane under T and T̄ with W_V = ∓1, W_Q = W_K = 1."""
    eye = torch.eye(2, dtype=torch.float64)
    start = Gaussian.centred(VARIANCE * eye).quadrature(per_axis, reach=4.0)
    against, along = Projections.tied(eye), Projections(eye, eye, eye)
    arms = {
        "T^∞, W_V = −1": AttentionMap(against, eps=eps),
        "T^∞, W_V = +1": AttentionMap(along, eps=eps),
        "T̄^∞, W_V = −1": AttentionMap(against, eps=eps, recentred=True),
        "T̄^∞, W_V = +1": AttentionMap(along, eps=eps, recentred=True),
        "T̄¹, W_V = −1": AttentionMap(against, eps=eps, cost="l2", n_iters=1, recentred=True),
    }
    ways = [_variances(attention, start, times) for attention in arms.values()]
    rows = [(t, *(way[k] for way in ways), VARIANCE + t, VARIANCE + 2 * t) for k, t in enumerate(times)]
    spread = sweep(
        f"Variance of {len(start)} particles from N(0, 1) in the plane, ε = {eps}",
        "half the trace of the covariance; the last columns are what ∂_t ρ = ½Δρ and the paper's ∂_t ρ = Δρ make of it",
        ("t", *arms, "½Δρ", "Δρ"),
        rows,
    )
    return Regimes(spread, _contraction(against, start, eps, contraction_times))


def _variances(attention: AttentionMap, start: Measure, times: Sequence[float]) -> list[float]:
    way = flow(attention, start, times, rtol=1e-5, atol=1e-5)
    return [way[k].covariance().trace().item() / 2 for k in range(len(way))]


def _contraction(projections: Projections, start: Measure, eps: float, times: Sequence[float]) -> Sweep:
    def energy(now: Measure) -> torch.Tensor:
        return energy_infinity(now, projections, eps=eps)

    way = flow(AttentionMap(projections, eps=eps), start, times, rtol=1e-5, atol=1e-8, energy=energy)
    rows = [
        (t, way.energies[k], way[k].covariance().trace().item() / 2, way.states[k].norm(dim=-1).max().item())
        for k, t in enumerate(times)
    ]
    return sweep(
        "The raw flow of T^∞ contracts: F^∞ falls to 0, its value at the point mass at the origin",
        "energy; half the trace of the covariance; largest distance from the origin",
        ("t", "F^∞", "variance", "farthest particle"),
        rows,
    )
