"""Attention of the runs of a comparison on one image, before and after training, side by side."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sinkformers.lab.artefacts.artefact import MODEL_FILE, ExperimentError, Record
from sinkformers.lab.error import LabError
from sinkformers.lab.reporting.comparison import comparisons, side
from sinkformers.lab.reporting.panels import FAINT, INK, SINKHORN, SOFTMAX, is_narrow
from sinkformers.lab.reporting.summary import SMOKE, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

EXAMPLES = "example-*.png"
FIRST_LAYER = "blocks.0.attention"  # of the ViT
MOST_SIDES, MOST_TOKENS = 4, 300
HEAT = ("#f5f4fa", "#cfcbea", "#948dd4", "#5a55b3", "#2f2a7d", "#14103f")


@dataclass(frozen=True)
class Side:
    """The attention of one model in its first layer: weights (tokens, tokens), and what each patch receives."""

    n_iters: int | float
    before: Tensor
    after: Tensor
    received: Tensor


@dataclass(frozen=True)
class Maps:
    """The sides of a comparison on one image, uint8 (channels, size, size)."""

    label: str
    pixels: Tensor
    sides: list[Side]


def find(records: Sequence[Record]) -> Maps | None:
    """Return the attention of the first seed of the first comparison whose runs hold models and images.

    None if there are no such runs, or if a model cannot be used by this version: a report does without the picture.
    """
    for comparison in comparisons(records):
        first = [runs[0] for runs in list(comparison.sides.values())[:MOST_SIDES]]
        folders = [run.folder for run in first if run.folder is not None and _has_images(run.folder)]
        if len(folders) == len(first) > 1 and not any(run.is_continued for run in first):
            try:
                return _maps(comparison.label, folders, [run.metrics["settings"]["n_iters"] for run in first])
            except (LabError, OSError, ValueError):
                return None
    return None


def draw(maps: Maps) -> Figure:
    """Draw a column per model: weights before and after training with their column sums, and the image coloured by
    the attention that its patches receive."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    n = len(maps.sides)
    small = is_narrow()
    size = (5.0, 7.2) if small else (3.3 * n + 0.6, 8.6)
    figure = Figure(figsize=size, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05))
    rows = figure.subplots(5, n, squeeze=False, height_ratios=(0.8, 3, 0.8, 3, 2.6))
    heat = LinearSegmentedColormap.from_list("heat", list(HEAT))
    shares = LinearSegmentedColormap.from_list("shares", [SOFTMAX, "#f1f1f6", SINKHORN[2]])
    highest = max(float(each.sum(0).max()) for one in maps.sides for each in (one.before, one.after))
    most = max(1.05, *(float(one.received.max()) for one in maps.sides))
    scale = ScalarMappable(TwoSlopeNorm(1.0, vmin=0.0, vmax=most), shares)
    for place, one in enumerate(maps.sides):
        name = "SoftMax" if one.n_iters == 1 else side(one.n_iters).replace(", ", "\n")
        title = name if "\n" in name else f"{name}\n"
        rows[0, place].set_title(title, fontsize=10 if small else 12, color=INK, loc="left")
        for top, weights in ((0, one.before), (2, one.after)):
            _bars(rows[top, place], weights.sum(0), highest, small)
            axes = rows[top + 1, place]
            axes.imshow(weights.numpy(), cmap=heat, vmin=0, aspect="auto")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        axes = rows[4, place]
        axes.imshow(one.received.numpy(), cmap=scale.cmap, norm=scale.norm, extent=(0, 1, 0, 1))
        grey = maps.pixels.double().mean(0).numpy() / 255
        ink = grey if grey.mean() < 0.5 else 1 - grey
        axes.imshow(ink, cmap=LinearSegmentedColormap.from_list("ink", ["#00000000", "#000000b0"]), extent=(0, 1, 0, 1))
        axes.set(xticks=[], yticks=[])
    for row, text in ((1, "before training"), (3, "after training"), (4, "received,\nafter training")):
        rows[row, 0].set_ylabel(text, fontsize=9 if small else 11, color=INK)
    bar = figure.colorbar(scale, ax=list(rows[4]), shrink=0.9, location="bottom", aspect=40)
    bar.set_label("attention that a patch receives; 1 is an even share", fontsize=9, color=INK)
    return figure


def caption(maps: Maps) -> str:
    """Say what the picture shows, with the column sums of each model."""
    sums = "; ".join(
        f"{side(one.n_iters)} {float(total.min()):.2f} to {float(total.max()):.2f}"
        for one in maps.sides
        for total in [one.after.sum(0)]
    )
    return (
        "Attention in the first layer, for one test image. A row of a map is a token that attends, a column one that "
        "is attended to; rows sum to 1, and the bars are the sums of the columns, the orange line is 1. Below, the "
        f"image itself over what its patches receive. Column sums after training: {sums}."
    )


def commands(summary: Summary) -> list[tuple[str, str]]:
    """Return what can be done next with the runs of a summary, and the command for it."""
    found = []
    images = [run for run in summary.records if run.folder is not None and any(run.folder.glob(EXAMPLES))]
    if images:
        run = images[-1].folder
        assert run is not None
        folder, here = run.resolve(), Path.cwd()
        folder = folder.relative_to(here) if folder.is_relative_to(here) else folder
        file = sorted(run.glob(EXAMPLES))[0].name
        found.append(
            (
                "Let a trained model read an image, and draw its attention",
                shlex.join(["sinkformers", "predict", str(folder), str(folder / file)]),
            )
        )
    if summary.preset == SMOKE and "small" in summary.artefact.presets:
        found.append(
            (
                "Train the same at a scale that means something",
                f"sinkformers run {summary.artefact.name} --preset small",
            )
        )
    if not summary.artefact.paper and summary.scale is not None:
        found.append(
            ("Repeat a figure of the paper on real data", "sinkformers run figure6 --preset small --data DIR"),
        )
    found.append(("See every experiment, its data and its duration", "sinkformers list"))
    return found


def _has_images(folder: Path) -> bool:
    return (folder / MODEL_FILE).exists() and any(folder.glob(EXAMPLES))


def _maps(label: str, folders: Sequence[Path], counts: Sequence[int | float]) -> Maps:
    from sinkformers.lab.data.formats.image_files import read_image
    from sinkformers.lab.inference.images import ImageClassifier, initial_model, patch_attention
    from sinkformers.lab.inference.trained import open_run

    sides, pixels = [], None
    for folder, n_iters in zip(folders, counts, strict=True):
        run = open_run(folder)
        classifier = ImageClassifier(run)
        size, channels = classifier.config.image, classifier.channels
        if (size // classifier.config.patch) ** 2 > MOST_TOKENS:
            raise ExperimentError("the images have too many patches for a small map.")
        pixels, _ = read_image(sorted(folder.glob(EXAMPLES))[0], size=size, channels=channels)
        batch = classifier.standardised(pixels)
        models = initial_model(run, channels), classifier.model
        before, after = (patch_attention(model, batch, classifier.config, FIRST_LAYER) for model in models)
        sides.append(Side(n_iters, before.weights, after.weights, after.received))
    assert pixels is not None
    return Maps(label, pixels, sides)


def _bars(axes: Axes, sums: Tensor, highest: float, small: bool) -> None:
    axes.bar(range(len(sums)), sums.tolist(), width=0.82, color=SINKHORN[0])
    axes.axhline(1, color=SOFTMAX, linewidth=1.1)
    axes.set_ylim(0, 1.05 * highest)
    axes.set_xlim(-0.5, len(sums) - 0.5)
    axes.set_xticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(left=False, colors=INK, labelsize=7 if small else 9)
