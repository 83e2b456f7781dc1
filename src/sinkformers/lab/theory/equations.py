"""Particles against the equations of the limits.

∂_t ρ = ½Δρ for Sinkhorn, and for SoftMax the equation of Proposition 4, which is nonlocal unless W_Q = W_K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers.flows import (
    RK4,
    AttentionMap,
    Bump,
    DensityPath,
    Gaussian,
    Grid,
    Measure,
    Projections,
    Trajectory,
    flow,
    gaussian_path,
    heat,
    paper_transformer_limit,
    score_flow,
    transformer_limit,
)
from sinkformers.lab.theory.proposition4 import W_KEY, W_QUERY
from sinkformers.lab.theory.sweep import Sweep, sweep

TIME = 0.1


@dataclass(frozen=True)
class Equations:
    heat: Sweep
    transformer: Sweep
    finite_volumes: Sweep


def run(*, n: int, cells: int, eps: Sequence[float], plane: int, plane_eps: Sequence[float]) -> Equations:
    """Compare `n` particles on a line with the heat equations, and `plane`² particles with Proposition 4's equation."""
    rows = []
    for width in eps:
        result = densities(n=n, eps=width, times=(0.0, TIME), cells=cells)
        rows.append((width, *(result.distance(arm, c, -1) for arm in result.particles for c in result.equations)))
    columns = ("ε", "Sinkhorn, ½Δρ", "Sinkhorn, Δρ", "SoftMax, ½Δρ", "SoftMax, Δρ")
    title = f"Density of {n} particles from (1 − x²)⁴ under T̄ with W_V = −1 at t = {TIME}, against ∂_t ρ = ½Δρ and Δρ"
    return Equations(
        sweep(title, "∫|ρ − ρ'|dx", columns, rows, fitted=("Sinkhorn, ½Δρ", "SoftMax, Δρ")),
        _transformer(plane, plane_eps),
        _finite_volumes(),
    )


@dataclass(frozen=True)
class Densities:
    """Particles on a line under T̄^∞ and T̄¹, and the solutions of ∂_t ρ = ½Δρ and ∂_t ρ = Δρ at the same times."""

    eps: float
    particles: dict[str, Trajectory]
    equations: dict[str, DensityPath]

    def distance(self, arm: str, equation: str, k: int) -> float:
        """Return ∫|ρ_particles − ρ| at time k, from the first particle to the last."""
        path = self.equations[equation]
        centres, density = particle_density(self.particles[arm][k])
        place = (centres + path.grid.reach) / path.grid.width - 0.5
        low = place.floor().long()
        part = place - low
        truth = path.densities[k][low] * (1 - part) + path.densities[k][low + 1] * part
        return torch.trapezoid((density - truth).abs(), centres).item()


def densities(*, n: int, eps: float, times: Sequence[float], cells: int = 801) -> Densities:
    """Compute the flows of ρ ∝ (1 − x²)⁴ as `n` weighted particles, and the equations on a grid."""
    start, one = Bump(4, 1).quadrature(n), torch.eye(1, dtype=torch.float64)
    maps = {
        "Sinkhorn": AttentionMap(Projections.tied(one), eps=eps, recentred=True),
        "SoftMax": AttentionMap(Projections.tied(one), eps=eps, cost="l2", n_iters=1, recentred=True),
    }
    grid = Grid(reach=4.0, cells=cells)
    at_start = grid.density(Bump(4, 1))
    return Densities(
        eps,
        {arm: flow(attention, start, times, rtol=1e-5, atol=1e-6) for arm, attention in maps.items()},
        {
            "½Δρ": heat(grid, at_start, times, coefficient=0.5),
            "Δρ": heat(grid, at_start, times, coefficient=1.0),
        },
    )


def particle_density(measure: Measure) -> tuple[Tensor, Tensor]:
    """Return the density of particles on a line between neighbours: mean weight over distance."""
    x, order = measure.points[:, 0].sort()
    weights = measure.weights[order]
    return (x[1:] + x[:-1]) / 2, (weights[1:] + weights[:-1]) / 2 / (x[1:] - x[:-1])


def _plane() -> tuple[Gaussian, Projections]:
    query, key = (torch.tensor(matrix, dtype=torch.float64) for matrix in (W_QUERY, W_KEY))
    return Gaussian.centred(torch.eye(2, dtype=torch.float64) / 2), Projections.tied(query, key)


def _transformer(per_axis: int, widths: Sequence[float]) -> Sweep:
    """Compare the covariance of particles with both versions of the equation."""
    density, projections = _plane()
    start = density.quadrature(per_axis, reach=4.0)
    ends = [
        gaussian_path(density, make(projections), (0.0, TIME))[-1].covariance
        for make in (transformer_limit, paper_transformer_limit)
    ]
    rows = []
    for eps in widths:
        attention = AttentionMap(projections, eps=eps, cost="l2", n_iters=1, recentred=True)
        # Equal steps: the outermost particles, which have almost no weight, would force adaptive steps to be tiny.
        end = flow(attention, start, (0.0, TIME), method=RK4, h=TIME / 20)[-1].covariance()
        rows.append((eps, *((end - wanted).norm().item() for wanted in ends)))
    columns = ("ε", "W_K⁻ᵀ", "the paper's W_K⁻¹")
    title = (
        f"Covariance of a Gaussian's {len(start)} particles under T̄¹ at t = {TIME}, against Proposition 4's equation"
    )
    return sweep(title, "Frobenius norm of the difference", columns, rows, fitted=columns[1:2])


def _finite_volumes() -> Sweep:
    """Compare the nonlocal equation on a grid with the exact Gaussian."""
    density, projections = _plane()
    velocity = transformer_limit(projections)
    end = gaussian_path(density, velocity, (0.0, TIME))[-1]
    rows = []
    for cells in (21, 29, 41):
        grid = Grid(reach=4.0, cells=cells, dim=2)
        path = score_flow(grid, grid.density(density), (0.0, TIME), velocity=velocity, rtol=1e-5)
        rows.append((cells, (path.densities[-1] - grid.density(end)).abs().max().item()))
    columns = ("cells", "largest error")
    title = f"Proposition 4's equation by finite volumes in the plane at t = {TIME}, against the exact Gaussian"
    return sweep(title, "largest absolute error of the density", columns, rows, fitted=columns[1:])
