"""Figures of the theory: densities against the equations, energies along flows, errors against ε and n.

sinkformers figure density --out docs/assets/density.png
sinkformers figure energy --out docs/assets/energy.png
sinkformers figure convergence --out docs/assets/convergence.png
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sinkformers.flows import (
    AttentionMap,
    Measure,
    Projections,
    Trajectory,
    energy_infinity,
    flow,
)
from sinkformers.lab.reporting.panels import FAINT, INK, SINKHORN, SOFTMAX, below, grid, title
from sinkformers.lab.theory.equations import Densities, particle_density
from sinkformers.lab.theory.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_densities(result: Densities) -> Figure:
    """Draw particles as dots and solutions of the equations as lines, with a panel each for Sinkhorn and SoftMax."""
    from matplotlib.lines import Line2D

    figure, ((left, right),) = grid(1, 2, height=3.2)
    for axes, arm, colour in ((left, "Sinkhorn", SINKHORN[0]), (right, "SoftMax", SOFTMAX)):
        way = result.particles[arm]
        for k in range(len(way)):
            x, density = particle_density(way[k])
            axes.plot(x.numpy()[::4], density.numpy()[::4], "o", color=colour, markersize=3, alpha=0.35 + 0.3 * k)
            for name, style in (("½Δρ", "-"), ("Δρ", ":")):
                path = result.equations[name]
                axes.plot(path.grid.centres()[:, 0].numpy(), path.densities[k].numpy(), style, color=INK, linewidth=1)
        axes.set_xlim(-2.1, 2.1)
        title(axes, f"{arm}, ε = {result.eps:g}", "t = " + ", ".join(f"{t:g}" for t in way.times))
    handles = [
        Line2D([], [], marker="o", linestyle="", color=FAINT, label="particles"),
        Line2D([], [], color=INK, linewidth=1, label="∂ρ/∂t = ½Δρ"),
        Line2D([], [], color=INK, linewidth=1, linestyle=":", label="∂ρ/∂t = Δρ"),
    ]
    below(figure, handles)
    return figure


@dataclass(frozen=True)
class Energies:
    """F^∞ of a cloud along the raw flows of T^∞ and T¹, and F^∞ with the cost "l2" along the recentred flows."""

    raw: dict[str, Trajectory]
    recentred: dict[str, Trajectory]


def energies(*, n: int = 60, frames: int = 21, seed: int = 0) -> Energies:
    """Particles in the plane, W_Q = W_K = 1 = −W_V, ε = ½."""
    start = Measure.uniform(torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    projections, eps = Projections.tied(torch.eye(2, dtype=torch.float64)), 0.5
    times = [1.5 * k / (frames - 1) for k in range(frames)]

    def ways(recentred: bool) -> dict[str, Trajectory]:
        counts = {"Sinkhorn": math.inf, "SoftMax": 1}
        return {
            arm: flow(
                AttentionMap(projections, eps=eps, cost="l2", n_iters=n_iters, recentred=recentred),
                start,
                times,
                energy=lambda now: energy_infinity(now, projections, eps=eps, cost="l2" if recentred else "dot"),
            )
            for arm, n_iters in counts.items()
        }

    return Energies(ways(False), ways(True))


def draw_energies(result: Energies) -> Figure:
    """Draw energies over time, with a panel each for the raw and the recentred flows."""
    figure, ((left, right),) = grid(1, 2, height=3.0)
    panels = (
        (left, result.raw, "F^∞ along T^∞ and T¹"),
        (right, result.recentred, "F^∞ with the cost l2 along T̄^∞ and T̄¹"),
    )
    for axes, ways, name in panels:
        for arm, way in ways.items():
            colour = SINKHORN[0] if arm == "Sinkhorn" else SOFTMAX
            axes.plot(way.times, way.energies, color=colour, linewidth=2, label=arm)
        title(axes, name)
        axes.set_xlabel("t", fontsize=10, color=INK)
    below(figure, left.get_lines())
    return figure


def draw_sweeps(sweeps: Sequence[Sweep]) -> Figure:
    """Draw errors against the parameter on logarithmic axes, one panel per sweep; the legend has the orders."""
    columns = 2 if len(sweeps) in (2, 4) else min(3, len(sweeps))
    figure, rows = grid(-(-len(sweeps) // columns), columns, height=4.6)
    panels = [axes for row in rows for axes in row]
    for unused in panels[len(sweeps) :]:
        unused.set_visible(False)
    for axes, each in zip(panels, sweeps, strict=False):
        _draw_sweep(axes, each)
    return figure


def _draw_sweep(axes: Axes, each: Sweep) -> None:
    from textwrap import fill

    from matplotlib.ticker import LogLocator

    parameter = each.column(each.columns[0])
    for name in each.columns[1:]:
        order = f", order {each.orders[name]:.2f}" if name in each.orders else ""
        colour = SOFTMAX if "SoftMax" in name else SINKHORN[0]
        style = ":" if "paper" in name else "--" if "inside" in name else "-"
        line = axes.loglog(parameter, each.column(name), style, marker="o", markersize=3, color=colour)
        line[0].set_label(name + order)
    low, high = axes.get_ylim()
    if high < 100 * low:  # less than two decades need more ticks
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xticks(parameter, [f"{value:g}" for value in parameter])
    axes.set_xlabel(each.columns[0], fontsize=10, color=INK)
    title(axes, fill(each.title, 56))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize=8, labelcolor=INK)
