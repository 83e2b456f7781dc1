"""Figures of attention: on a shape, on an image, and between the tokens of a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinkformers.lab.inference.clouds import Prediction
from sinkformers.lab.inference.images import ImagePrediction
from sinkformers.lab.inference.texts import Attention
from sinkformers.lab.reporting.panels import FAINT, INK, SINKHORN, SOFTMAX, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VIEWS = ((20, -60), (20, 30), (80, -90))  # elevation and azimuth, in degrees
LEAST = 0.05  # the colour scale covers at least 1 ± this
MOST_LABELS = 60


def cloud(prediction: Prediction) -> Figure:
    """Draw three views of a shape, each point coloured by the attention it receives: violet above the mean, orange
    below, grey for points that attention does not see."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 4.8), facecolor="white", layout="constrained")
    attention = prediction.attention
    panels = [figure.add_subplot(1, len(VIEWS), place, projection="3d") for place in range(1, len(VIEWS) + 1)]
    drawn: Any = None
    for axes, (elevation, azimuth) in zip(panels, VIEWS, strict=True):
        seen_all = attention is not None and len(attention.places) == len(prediction.points)
        if not seen_all:
            axes.scatter(*prediction.points.T.numpy(), s=5, color=FAINT, linewidths=0)
        if attention is not None:
            places, shares = attention.places.T.numpy(), attention.shares.numpy()
            drawn = axes.scatter(*places, c=shares, s=36, linewidths=0, depthshade=False, **_scale(attention.shares))
            if attention.picked is not None:
                axes.scatter(*attention.places[attention.picked].numpy()[:, None], s=140, marker="*", color=INK)
        axes.view_init(elevation, azimuth)  # pyright: ignore[reportAttributeAccessIssue]
        axes.set_box_aspect((1, 1, 1))  # pyright: ignore[reportAttributeAccessIssue]
        for set_limits in (axes.set_xlim, axes.set_ylim, axes.set_zlim):  # pyright: ignore[reportAttributeAccessIssue]
            set_limits(-0.6, 0.6)
        axes.set_axis_off()
    name, likely = prediction.classes[0]
    figure.suptitle(plain(f"{prediction.file.name}: {name}, {likely:.0%}"), fontsize=13, color=INK)
    if attention is not None and drawn is not None:
        bar = figure.colorbar(drawn, ax=panels, shrink=0.7)
        bar.set_label(_meaning(attention.layer, attention.picked), color=INK)
    return figure


def _scale(shares: Tensor) -> dict[str, Any]:
    """Return a colour scale that is grey at 1, the mean, and covers all shares."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    colours = LinearSegmentedColormap.from_list("shares", [SOFTMAX, "#d8d8e4", SINKHORN[2]])
    low, high = min(float(shares.min()), 1 - LEAST), max(float(shares.max()), 1 + LEAST)
    return {"cmap": colours, "norm": TwoSlopeNorm(1.0, vmin=low, vmax=high)}


def _meaning(layer: str, picked: int | None) -> str:
    if picked is None:
        return f"share of attention received in {layer} (1 is even)"
    return f"attention paid to point {picked} (the star) in {layer} (1 is even)"


def sentence(attention: Attention) -> Figure:
    """Draw the weights between the tokens of a sentence (rows attend to columns), with the column sums above."""
    from matplotlib.figure import Figure

    n = len(attention.tokens)
    side = min(11.0, max(5.0, 2.5 + 0.26 * n))
    figure = Figure(figsize=(side, side + 1.0), facecolor="white", layout="constrained")
    above, matrix = figure.subplots(2, 1, height_ratios=(1, 5), sharex=True)
    above.bar(range(n), attention.weights.sum(0).numpy(), color=SINKHORN[0])
    above.axhline(1.0, color=SOFTMAX, linewidth=1.2)
    above.set_ylabel("column sum", color=INK)
    above.spines[["top", "right"]].set_visible(False)
    above.tick_params(labelbottom=False)
    drawn = matrix.imshow(attention.weights.numpy(), cmap="Purples", aspect="auto", vmin=0.0)
    figure.colorbar(drawn, ax=[above, matrix], shrink=0.5, aspect=30).set_label("weight", color=INK)
    if n <= MOST_LABELS:
        labels = [plain(token) for token in attention.tokens]
        matrix.set_xticks(range(n), labels, rotation=90, fontsize=8)
        matrix.set_yticks(range(n), labels, fontsize=8)
    above.set_title(plain(f"{attention.layer}, mean of its heads"), fontsize=11, color=INK, loc="left")
    return figure


def image(prediction: ImagePrediction) -> Figure:
    """Draw an image, the attention that each of its patches receives, and the weights with their column sums."""
    from matplotlib.figure import Figure

    attention = prediction.attention
    figure = Figure(figsize=(10.4, 4.2), facecolor="white", layout="constrained")
    seen, received, sums = figure.subplots(1, 3, width_ratios=(1, 1.15, 1.15))
    name, likely = prediction.classes[0]
    show_pixels(seen, prediction.pixels)
    seen.set_title(plain(f"{prediction.file.name}: {name}, {likely:.0%}"), fontsize=11, color=INK, loc="left")
    drawn = received.imshow(attention.received.numpy(), **_scale(attention.received))
    received.set(xticks=[], yticks=[])
    received.set_title("received by each patch", fontsize=11, color=INK, loc="left")
    figure.colorbar(drawn, ax=received, shrink=0.7).set_label("1 is an even share", color=INK)
    weights = sums.imshow(attention.weights.numpy(), cmap="Purples", vmin=0.0)
    sums.set_xlabel("tokens attended to", color=INK)
    sums.set_ylabel("tokens that attend", color=INK)
    total = attention.weights.sum(0)
    sums.set_title(f"column sums {total.min():.2f} to {total.max():.2f}", fontsize=11, color=INK, loc="left")
    figure.colorbar(weights, ax=sums, shrink=0.7).set_label(plain(f"weight in {attention.layer}"), color=INK)
    return figure


def show_pixels(axes: Axes, pixels: Tensor) -> None:
    """Show pixels, uint8 (channels, height, width), in grey or in colour."""
    shown = pixels.movedim(0, -1).squeeze(-1).numpy()
    axes.imshow(shown, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])
