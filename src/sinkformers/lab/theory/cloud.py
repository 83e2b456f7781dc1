"""Particles in the plane under SoftMax and under Sinkhorn, side by side.

    sinkformers figure flow --out docs/assets/flow.png
    sinkformers figure flow --out docs/assets/flow.gif

Both maps are recentred, with `W_Q = W_K = 1`. W_V = −1 drives particles apart, W_V = +1 together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sinkformers.flows import AttentionMap, Measure, Projections, Trajectory, flow
from sinkformers.lab.reporting.panels import FAINT, INK, SINKHORN, SOFTMAX, save, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPS = 0.08
ANIMATED = (".gif", ".webp")


@dataclass(frozen=True)
class Cloud:
    """Trajectories by the sign of W_V ("−1", "+1") and by the map ("SoftMax", "Sinkhorn")."""

    ways: dict[tuple[str, str], Trajectory]


def run(*, n: int = 180, frames: int = 25, seed: int = 4) -> Cloud:
    """Compute the flow of a dense and a sparse cluster over time 0.1, for both signs of W_V."""
    generator = torch.Generator().manual_seed(seed)
    points = 0.28 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    sparse = torch.arange(n) >= 3 * n // 4
    points[:, 0] += torch.where(sparse, 0.8, -0.5)
    points[sparse, 1] *= 1.6
    start, eye = Measure.uniform(points), torch.eye(2, dtype=torch.float64)
    times = [0.1 * k / (frames - 1) for k in range(frames)]
    ways = {}
    for sign, value in (("−1", -eye), ("+1", eye)):
        projections = Projections(eye, eye, value)
        maps = {
            "SoftMax": AttentionMap(projections, eps=EPS, cost="l2", n_iters=1, recentred=True),
            "Sinkhorn": AttentionMap(projections, eps=EPS, n_iters=math.inf, recentred=True),
        }
        for arm, attention in maps.items():
            ways[sign, arm] = flow(attention, start, times, rtol=1e-4, atol=1e-4)
    return Cloud(ways)


def draw(cloud: Cloud, path: Path | str) -> None:
    """Draw the start, path and end of the particles; as an animation if the suffix is .gif or .webp."""
    if Path(path).suffix.lower() not in ANIMATED:
        figure = _panels(cloud, 3.4)[0]
        for (sign, arm), axes in zip(cloud.ways, figure.axes, strict=True):
            _trails(axes, cloud.ways[sign, arm], arm)
        save(figure, path)
        return
    from matplotlib.animation import FuncAnimation, PillowWriter

    figure, panels = _panels(cloud, 2.3)
    dots = [
        axes.scatter(*way.states[0].T.numpy(), s=7, color=_colour(arm), linewidths=0)
        for axes, ((_, arm), way) in zip(panels, cloud.ways.items(), strict=True)
    ]
    ways = list(cloud.ways.values())
    # The last frame stays for a while.
    order = [*range(len(ways[0])), *[len(ways[0]) - 1] * 8]

    def show(frame: int) -> list:
        for dot, way in zip(dots, ways, strict=True):
            dot.set_offsets(way.states[frame].numpy())
        return dots

    FuncAnimation(figure, show, frames=order, blit=False).save(path, writer=PillowWriter(fps=12), dpi=72)


def _panels(cloud: Cloud, size: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * size + 0.4, 2 * size), facecolor="white", layout="constrained")
    panels = list(figure.subplots(2, 2).flat)
    for axes, (sign, arm) in zip(panels, cloud.ways, strict=True):
        title(axes, f"{arm}, W_V = {sign}")
        axes.set(xlim=(-1.7, 2.0), ylim=(-1.6, 1.6), xticks=[], yticks=[], aspect="equal")
        axes.spines[:].set_color(FAINT)
    return figure, panels


def _trails(axes: Axes, way: Trajectory, arm: str) -> None:
    from matplotlib.collections import LineCollection

    paths = [path.numpy() for path in way.states.unbind(1)]
    axes.add_collection(LineCollection(paths, linewidths=0.5, colors=FAINT, alpha=0.6))
    axes.scatter(*way.states[0].T.numpy(), s=4, color=INK, alpha=0.35, linewidths=0)
    axes.scatter(*way.states[-1].T.numpy(), s=11, color=_colour(arm), linewidths=0, zorder=3)


def _colour(arm: str) -> str:
    return SOFTMAX if arm == "SoftMax" else SINKHORN[0]
