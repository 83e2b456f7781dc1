"""Proposition 2: T⁰ and T^∞ are minus the Wasserstein gradients of F⁰ and F^∞; T¹ is a gradient in its query alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers.flows import RK4, AttentionMap, Measure, Projections, energy_infinity, energy_zero, flow
from sinkformers.lab.theory.sweep import Sweep, sweep

Energy = Callable[[Measure], Tensor]


@dataclass(frozen=True)
class Proposition2:
    identities: Sweep
    decay: Sweep
    softmax_gap: Sweep


def run(*, n: int, dim: int = 2, steps: tuple[int, ...] = (8, 16, 32), seed: int = 0) -> Proposition2:
    """Check the identities for `n` particles, the decay of energies along flows, and candidate energies for T¹."""
    generator = torch.Generator().manual_seed(seed)
    measure = Measure.uniform(torch.randn(n, dim, generator=generator, dtype=torch.float64))
    projections = Projections.tied(torch.randn(dim, dim, generator=generator, dtype=torch.float64) / 2)
    energies: dict[str, Energy] = {
        "F⁰": lambda now: energy_zero(now, projections),
        "F^∞": lambda now: energy_infinity(now, projections, tol=1e-13),
    }
    maps = {
        "F⁰": AttentionMap(projections, n_iters=0),
        "F^∞": AttentionMap(projections, n_iters=math.inf, tol=1e-13),
    }
    return Proposition2(
        _identities(measure, projections, energies, maps),
        _decay(measure, energies, maps, steps),
        _softmax_gap(measure, projections, energies),
    )


def gradient(energy: Energy, measure: Measure) -> Tensor:
    """Return `∂F/∂x_i / w_i` (n, d), by autograd."""
    points = measure.points.clone().requires_grad_()
    (found,) = torch.autograd.grad(energy(measure.moved(points)), points)
    return found / measure.weights[:, None]


def _identities(
    measure: Measure, projections: Projections, energies: dict[str, Energy], maps: dict[str, AttentionMap]
) -> Sweep:
    rows = []
    for name, energy in energies.items():
        values = maps[name](measure)(measure.points)
        rows.append((f"n ∂{name}/∂x_i = −T(x_i)", (gradient(energy, measure) + values).abs().max().item()))
    query = measure.points.clone().requires_grad_()
    logs = (query @ projections.interaction @ measure.points.mT + measure.weights.log()).logsumexp(-1)
    (found,) = torch.autograd.grad(logs.sum(), query)
    values = AttentionMap(projections, n_iters=1)(measure)(measure.points)
    rows.append(("T¹(x) = −∇_x log ∫k⁰(x, ·)dμ", (found + values).abs().max().item()))
    title = f"The gradients by autograd, {len(measure)} particles"
    return sweep(title, "largest coordinate", ("identity", "largest difference"), rows)


def _decay(
    measure: Measure, energies: dict[str, Energy], maps: dict[str, AttentionMap], steps: tuple[int, ...]
) -> Sweep:
    rows = []
    for count in steps:
        row: list[float] = [count]
        for name, energy in energies.items():
            times = [k / count for k in range(count + 1)]
            way = flow(maps[name], measure, times, method=RK4, h=1.0, energy=energy)
            rates = [way[k].norm(maps[name](way[k])(way.states[k])) ** 2 for k in range(len(way))]
            spent = (rates[0] + rates[-1] + 4 * sum(rates[1:-1:2]) + 2 * sum(rates[2:-1:2])) / (3 * count)  # Simpson
            lost = way.energies[0] - way.energies[-1]
            row += [lost, abs(lost - spent)]
        rows.append(row)
    columns = ("steps", *(each for name in energies for each in (f"{name} lost", f"{name} defect")))
    return sweep(
        "Energy lost along its own flow over time 1, and its distance from ∫∫|T|²dμ dt",
        "absolute value; RK4 for the flow, Simpson's rule for the integral",
        columns,
        rows,
        fitted=[f"{name} defect" for name in energies],
    )


def _softmax_gap(measure: Measure, projections: Projections, energies: dict[str, Energy]) -> Sweep:
    """Compare T¹ with the gradients of natural candidate energies."""

    def logarithm(now: Measure) -> Tensor:
        scores = now.points @ projections.interaction @ now.points.mT
        return now.integrate((scores + now.weights.log()).logsumexp(-1))

    candidates: dict[str, Energy] = {
        "∫ log ∫k⁰dμ dμ": logarithm,
        "½ ∫ log ∫k⁰dμ dμ": lambda now: logarithm(now) / 2,
        **energies,
    }
    values = AttentionMap(projections, n_iters=1)(measure)(measure.points)
    rows = [
        (name, measure.norm(gradient(energy, measure) + values) / measure.norm(values))
        for name, energy in candidates.items()
    ]
    return sweep(
        "How far T¹ is from minus the gradient of an energy",
        "L²(μ), relative to T¹",
        ("energy", "gap"),
        rows,
    )
