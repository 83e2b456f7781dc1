"""Figure 1 of the paper: one set of scores, normalised not at all, over rows, and over rows and columns.

    sinkformers run figure1 --out runs

Ten points x_i give ten queries W_Q x_i and ten keys W_K x_j in the plane, and the scores C_ij = (W_Q x_i)ᵀ W_K x_j.
The paper reads three statements off its picture, and they hold here as numbers:

- K⁰ = exp(C): one interaction dominates, it is more than 9/10 of the whole matrix;
- K¹ (SoftMax): one cluster is ignored, its keys receive less than 1/100 each;
- K^∞ (Sinkhorn): all points interact, every key receives 1.

The paper does not publish its points. Ours are two Gaussian clusters, moved away from the origin so that the keys of
one cluster score higher with every query.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sinkformers.lab.artefacts.artefact import Artefact, Preset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

SMALLEST_LINK = 1e-12
N_POINTS = 10
SEED = 25
CLUSTER_DISTANCE, CLUSTER_STD = 3.2, 0.7

# The third coordinate of every x_i is 1, so that the last column of W_Q and W_K moves a cloud as a whole.
W_QUERY = ((1.0, 0.0, 4.5), (0.0, 1.0, 1.5))
W_KEY = ((1.0, 0.0, 3.3), (0.0, 1.0, -2.5))

QUERY_COLOUR, KEY_COLOUR, LINK_COLOUR, INK = "#1f9d55", "#d6354a", "#3d4663", "#1f2433"


@dataclass(frozen=True)
class Normalizations:
    """Two clouds, (n, 2) each, and the three matrices (n, n) that link queries (rows) to keys (columns).

    `cluster` (n,) holds 0 or 1: the cluster that each point, and so each query and each key, belongs to.
    """

    queries: Tensor
    keys: Tensor
    cluster: Tensor
    unnormalised: Tensor
    softmax: Tensor
    sinkhorn: Tensor

    @property
    def column_sums(self) -> Tensor:
        """What each key receives under K⁰, K¹ and K^∞: (3, n)."""
        import torch

        return torch.stack([weights.sum(dim=0) for weights in (self.unnormalised, self.softmax, self.sinkhorn)])

    @property
    def dominance(self) -> float:
        """The largest entry of K⁰ as a share of all of K⁰."""
        return float(self.unnormalised.max() / self.unnormalised.sum())


def run(*, seed: int = SEED, tol: float = 1e-10) -> Normalizations:
    """Draw the points and normalise their scores, in float64; `tol` bounds the distance of K^∞'s column sums from 1."""
    import torch

    from sinkformers import sinkhorn, sinkhorn_limit

    generator = torch.Generator().manual_seed(seed)
    plane = CLUSTER_STD * torch.randn(N_POINTS, 2, generator=generator, dtype=torch.float64)
    cluster = (torch.arange(N_POINTS) >= N_POINTS // 2).long()
    plane[:, 0] += CLUSTER_DISTANCE * (cluster - 0.5)
    points = torch.cat([plane, plane.new_ones(N_POINTS, 1)], dim=1)

    queries = points @ points.new_tensor(W_QUERY).T
    keys = points @ points.new_tensor(W_KEY).T
    scores = queries @ keys.T
    return Normalizations(
        queries=queries,
        keys=keys,
        cluster=cluster,
        unnormalised=scores.exp(),
        softmax=sinkhorn(scores, n_iters=1),
        sinkhorn=sinkhorn_limit(scores, tol=tol),
    )


def draw(result: Normalizations, path: Path | str) -> None:
    """Write the three panels to `path`; the suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 5.4), facecolor="white", layout="constrained")
    received = [float(result.softmax[:, result.cluster == which].sum()) for which in (0, 1)]
    panels = (
        (result.unnormalised, r"$K^0 = \exp(C)$", f"one link carries {result.dominance:.1%} of the matrix"),
        (result.softmax, r"$K^1$, SoftMax", f"one cluster of keys receives {min(received):.3f} in all"),
        (result.sinkhorn, r"$K^\infty$, Sinkhorn", "every key receives 1"),
    )
    for axes, (weights, title, statement) in zip(figure.subplots(1, 3), panels, strict=True):
        _draw_links(axes, result.queries, result.keys, weights)
        axes.set_title(f"{title}\n", fontsize=17, color=INK, pad=12)
        axes.text(0.5, 1.04, statement, transform=axes.transAxes, ha="center", fontsize=12, color=LINK_COLOUR)
    handles = [
        figure.axes[0].scatter([], [], s=70, color=QUERY_COLOUR, label=r"queries $W_Q x_i$"),
        figure.axes[0].scatter([], [], s=70, color=KEY_COLOUR, label=r"keys $W_K x_j$"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=12, labelcolor=INK)
    figure.savefig(path, dpi=150)


def _draw_links(axes: Axes, queries: Tensor, keys: Tensor, weights: Tensor) -> None:
    import torch
    from matplotlib.collections import LineCollection

    rows, columns = (weights >= SMALLEST_LINK).nonzero(as_tuple=True)
    segments = torch.stack([queries[rows], keys[columns]], dim=1)
    # K⁰ reaches 10¹⁸ where K¹ and K^∞ stay below 1, so a width is K_ij as a share of its panel's largest entry.
    widths = 5.0 * weights[rows, columns] / weights.max()
    links = LineCollection(list(segments.numpy()), linewidths=widths.tolist(), colors=LINK_COLOUR, capstyle="round")
    axes.add_collection(links)
    axes.scatter(*queries.T.numpy(), s=90, color=QUERY_COLOUR, edgecolors="white", linewidths=1.2, zorder=3)
    axes.scatter(*keys.T.numpy(), s=90, color=KEY_COLOUR, edgecolors="white", linewidths=1.2, zorder=3)
    axes.set_aspect("equal")
    axes.margins(0.06)
    axes.set_axis_off()


def make(preset: Preset, folder: Path) -> str:
    """Draw the figure, as PNG and SVG, and say what each key receives; every preset means the same ten points."""
    result = run()
    for suffix in ("png", "svg"):
        draw(result, folder / f"figure1.{suffix}")
    lines = ["What each key receives (column sums)", f"{'key':>3}  cluster  K⁰ = exp(C)  K¹ SoftMax  K^∞ Sinkhorn"]
    for key, (cluster, sums) in enumerate(zip(result.cluster.tolist(), result.column_sums.T.tolist(), strict=True)):
        unnormalised, softmax, sinkhorn = sums
        lines.append(f"{key + 1:>3}  {'AB'[cluster]:>7}  {unnormalised:>11.2e}  {softmax:>10.6f}  {sinkhorn:>12.6f}")
    return "\n".join(lines)


FIGURE1 = Artefact(
    name="figure1",
    title="Links of K⁰, K¹ and K^∞ between two clouds of ten points",
    paper="a picture; its points are not published",
    presets=dict.fromkeys(
        ("paper", "small", "smoke"),
        Preset(about="ten points, float64", takes="seconds", data="", seeds=(), arms=(), config=None),
    ),
    make=make,
)
