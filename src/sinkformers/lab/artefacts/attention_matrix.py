"""What Sinkhorn does to an attention matrix: the same scores after 1, 3 and 21 normalisations.

    sinkformers figure attention --out docs/assets/attention.png

The scores imitate a trained head: every query prefers its neighbours, and a few keys have high scores with all queries.
Under SoftMax (n_iters = 1) those few receive most of the attention. The column steps give every key the same amount,
and keep the differences between queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sinkformers import sinkhorn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

N_TOKENS = 24
N_ITERS = (1, 3, 21)
SEED = 9

INK, FAINT, BAR, EVEN = "#1f2433", "#8a90a6", "#5a55b3", "#e8743b"
HEAT = ("#f5f4fa", "#cfcbea", "#948dd4", "#5a55b3", "#2f2a7d", "#14103f")


@dataclass(frozen=True)
class AttentionMatrices:
    """The scores (n, n), and the weights (n, n) that each count of normalisations makes of them."""

    scores: Tensor
    weights: dict[int, Tensor]

    @property
    def column_sums(self) -> dict[int, Tensor]:
        """What each key receives, (n,), for each count of normalisations."""
        return {n_iters: weights.sum(dim=0) for n_iters, weights in self.weights.items()}


def run(*, n_tokens: int = N_TOKENS, seed: int = SEED) -> AttentionMatrices:
    """Make the scores, in float64, and normalise them 1, 3 and 21 times."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(n_tokens, dtype=torch.float64)
    neighbours = 2.6 * torch.exp(-0.5 * ((position[:, None] - position) / 1.8) ** 2)
    noise = 0.45 * torch.randn(n_tokens, n_tokens, generator=generator, dtype=torch.float64)
    popularity = 1.5 * torch.randn(n_tokens, generator=generator, dtype=torch.float64)
    scores = neighbours + noise + popularity
    return AttentionMatrices(scores, {n_iters: sinkhorn(scores, n_iters=n_iters) for n_iters in N_ITERS})


def draw(result: AttentionMatrices, path: Path | str) -> None:
    """Write one heat map for each count, its column sums as bars above it, to `path`; the suffix chooses the format."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # An opaque white ground: the picture reads the same on a light and on a dark page.
    figure = Figure(figsize=(11.4, 5.1), facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.06))
    grid = figure.subplots(2, len(result.weights), height_ratios=(1, 3.1), sharey="row", sharex="col")
    highest = max(float(sums.max()) for sums in result.column_sums.values())
    darkest = max(float(weights.max()) for weights in result.weights.values())
    scale = ScalarMappable(Normalize(0, darkest), LinearSegmentedColormap.from_list("heat", HEAT))
    for column, (n_iters, weights) in enumerate(result.weights.items()):
        name = "SoftMax" if n_iters == 1 else "Sinkhorn"
        bars, heat = grid[0, column], grid[1, column]
        bars.set_title(f"{name}, n_iters = {n_iters}", fontsize=14.5, color=INK, pad=12)
        _draw_column_sums(bars, weights.sum(dim=0), highest)
        heat.imshow(weights.numpy(), cmap=scale.cmap, norm=scale.norm, aspect="auto")
        heat.set(xticks=[], yticks=[])
        heat.set_xlabel("keys", fontsize=12, color=INK)
        heat.spines[:].set_visible(False)
    grid[0, 0].set_ylabel("column sums", fontsize=12, color=INK)
    grid[1, 0].set_ylabel("queries", fontsize=12, color=INK)
    bar = figure.colorbar(scale, ax=grid[1, :], fraction=0.02, pad=0.015)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, length=0, labelsize=10)
    figure.savefig(path, dpi=140)


def _draw_column_sums(axes: Axes, sums: Tensor, highest: float) -> None:
    axes.bar(range(len(sums)), sums.tolist(), width=0.82, color=BAR)
    axes.axhline(1, color=EVEN, linewidth=1.3, linestyle=(0, (4, 2)))
    axes.set_ylim(0, 1.08 * highest)
    lowest, largest = f"{sums.min():.2f}", f"{sums.max():.2f}"
    extent = f"{lowest} to {largest}" if lowest != largest else f"all {largest}"
    axes.text(0.99, 0.86, extent, transform=axes.transAxes, ha="right", fontsize=12, color=INK)
    axes.tick_params(bottom=False, left=False, colors=INK, labelsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
