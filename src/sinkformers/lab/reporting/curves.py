"""Figures by epoch: learning curves, column sums, marginal errors.

Every run is drawn. A bold line is the median over runs; it has a gap where a run diverged. Where no run holds what a
figure shows, it raises `ExperimentError`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinkformers.lab.artefacts.artefact import ExperimentError, Record
from sinkformers.lab.reporting.comparison import comparisons, side, with_softmax
from sinkformers.lab.reporting.metrics import METRICS
from sinkformers.lab.reporting.panels import (
    INK,
    SINKHORN,
    TARGET,
    below,
    colours,
    count_epochs,
    grid,
    in_units,
    legend,
    plain,
    share,
    title,
    wrapped,
)
from sinkformers.lab.reporting.records import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Read = Callable[[Mapping[str, Any]], float | None]  # one number of an epoch, None if it was not measured


def learning(records: Sequence[Record]) -> Figure:
    """Draw all metrics in training and in test: one row of panels per comparison, one colour per n_iters.

    The axes are fitted to trained models: a randomly initialised model may lie outside. Runs that start from a trained
    model, and have less left to learn, have axes of their own.
    """
    curves = [(split, metric) for metric in METRICS.values() if metric.has_curve for split in ("train", "test")]
    shown = [(split, metric) for split, metric in curves if _measured(records, _reader(split, metric.name))]
    if not shown:
        raise ExperimentError("no run holds a metric by epoch.")
    compared = with_softmax(comparisons(records))
    counts = [n_iters for comparison in compared for n_iters in comparison.sides]
    colour = colours(counts)
    figure, rows = grid(len(compared), len(shown))
    scales: dict[tuple[str, bool], list[tuple[Axes, list[float]]]] = {}
    for row, comparison in zip(rows, compared, strict=True):
        together = [run for runs in comparison.sides.values() for run in runs]
        for axes, (split, metric) in zip(row, shown, strict=True):
            read = _reader(split, metric.name)
            for n_iters, runs in comparison.sides.items():
                _draw_runs(axes, runs, read, colour[n_iters])
            title(axes, f"{split} {metric.label}", comparison.label)
            count_epochs(axes)
            in_units(axes.yaxis, metric)
            panel = axes, _learned(together, read)
            scales.setdefault((metric.name, any(run.is_continued for run in together)), []).append(panel)
    for axes in rows[-1]:
        axes.set_xlabel("epoch", fontsize=10, color=INK)
    for panels in scales.values():
        share([axes for axes, _ in panels], [each for _, learned in panels for each in learned])
    legend(figure, counts)
    return figure


def column_sums(records: Sequence[Record]) -> Figure:
    """Draw column sums from before training on: one panel per arm, bands between quantiles of all columns.

    Quantiles are medians over runs; the thin lines are the medians of single runs.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if not _measured(records, _quantile(4)):
        raise ExperimentError("no run holds quantiles of its column sums.")
    figure, panels = _panel_per_arm(records)
    figure.supylabel("column sums", fontsize=10, color=INK)
    for axes, runs in panels:
        for low, high, shade in ((0, 4, 0.16), (1, 3, 0.34)):
            epochs, lower = _median(runs, _quantile(low))
            _, upper = _median(runs, _quantile(high))
            axes.fill_between(epochs, lower, upper, color=SINKHORN[0], alpha=shade, linewidth=0)
        _draw_runs(axes, runs, _quantile(2), SINKHORN[0])
        axes.axhline(1, color=TARGET, linewidth=1.3, linestyle=(0, (4, 2)), zorder=3)
    share([axes for axes, _ in panels])
    handles = [
        Patch(color=SINKHORN[0], alpha=0.16, linewidth=0, label="5 to 95 % of columns"),
        Patch(color=SINKHORN[0], alpha=0.45, linewidth=0, label="25 to 75 %"),
        Line2D([], [], color=SINKHORN[0], linewidth=2.2, label="median"),
        Line2D([], [], color=TARGET, linewidth=1.3, linestyle=(0, (4, 2)), label="doubly stochastic"),
    ]
    below(figure, handles)
    return figure


def marginal_errors(records: Sequence[Record]) -> Figure:
    """Draw the larger of row and column error on a logarithmic axis: one panel per arm, one line per layer."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    names = dict.fromkeys(_name(layer) for epoch in _epochs(records) for layer in epoch.get("layers") or [])
    layers = [name for name in names if _measured(records, _error(name))]
    if not layers:
        raise ExperimentError("no run holds the marginal errors of its layers.")
    shades = [colormaps["viridis"](0.85 * place / max(1, len(layers) - 1)) for place in range(len(layers))]
    figure, panels = _panel_per_arm(records)
    figure.supylabel("marginal error", fontsize=10, color=INK)
    for axes, runs in panels:
        for name, shade in zip(layers, shades, strict=True):
            _draw_runs(axes, runs, _error(name), shade)
        axes.set_yscale("symlog", linthresh=1e-8)  # the error of a single token is exactly 0
    share([axes for axes, _ in panels])
    handles = [
        Line2D([], [], color=shade, linewidth=2.2, label=plain(name))
        for name, shade in zip(layers, shades, strict=True)
    ]
    below(figure, handles)
    return figure


def _panel_per_arm(records: Sequence[Record]) -> tuple[Figure, list[tuple[Axes, list[Record]]]]:
    compared = comparisons(records)
    arms = [(each, n_iters) for each in compared for n_iters in each.sides]
    figure, panels = wrapped(len(arms), max(len(each.sides) for each in compared))
    for axes, (comparison, n_iters) in zip(panels, arms, strict=True):
        title(axes, side(n_iters), comparison.label)
        axes.set_xlabel("epoch", fontsize=10, color=INK)
        count_epochs(axes)
    return figure, [(axes, each.sides[n_iters]) for axes, (each, n_iters) in zip(panels, arms, strict=True)]


def _draw_runs(axes: Axes, runs: Sequence[Record], read: Read, colour: Any) -> None:
    """Draw a thin line per run and a bold line through the medians; a single epoch is a dot."""
    for run in runs:
        axes.plot(*_points(run, read), color=colour, linewidth=0.7, alpha=0.5)
    epochs, medians = _median(runs, read)
    axes.plot(epochs, medians, color=colour, linewidth=2.2, marker="o" if len(epochs) == 1 else "", markersize=5)


def _median(runs: Sequence[Record], read: Read) -> tuple[list[int], list[float]]:
    by_epoch: dict[int, list[float]] = {}
    for run in runs:
        for epoch, each in zip(*_points(run, read), strict=True):
            by_epoch.setdefault(epoch, []).append(each)
    # One NaN makes the median NaN, a gap in the line: leaving the run out would flatter the others.
    epochs = sorted(by_epoch)
    return epochs, [math.nan if any(map(math.isnan, by_epoch[e])) else statistics.median(by_epoch[e]) for e in epochs]


def _points(run: Record, read: Read) -> tuple[list[int], list[float]]:
    """Return the measured epochs and their values."""
    points = [(epoch.get("epoch", place), read(epoch)) for place, epoch in enumerate(run.metrics["epochs"])]
    return [epoch for epoch, each in points if each is not None], [each for _, each in points if each is not None]


def _learned(runs: Iterable[Record], read: Read) -> list[float]:
    """Return values of trained models: from epoch 1 on, and epoch 0 of runs that start from a trained model."""
    points = [(run, epoch, each) for run in runs for epoch, each in zip(*_points(run, read), strict=True)]
    return [each for run, epoch, each in points if (epoch or run.is_continued) and math.isfinite(each)]


def _measured(records: Iterable[Record], read: Read) -> bool:
    return any(read(epoch) is not None for epoch in _epochs(records))


def _epochs(records: Iterable[Record]) -> list[Mapping[str, Any]]:
    return [epoch for record in records for epoch in record.metrics["epochs"]]


def _reader(split: str, name: str) -> Read:
    return lambda epoch: number(epoch.get(split), name)


def _quantile(place: int) -> Read:
    def read(epoch: Mapping[str, Any]) -> float | None:
        quantiles = (epoch.get("columns") or {}).get("quantiles") or []
        return float(quantiles[place]) if len(quantiles) == 5 and None not in quantiles else None

    return read


def _error(layer: str) -> Read:
    def read(epoch: Mapping[str, Any]) -> float | None:
        for each in epoch.get("layers") or []:
            if _name(each) == layer:
                errors = [number(each, "row_error"), number(each, "column_error")]
                return max((error for error in errors if error is not None), default=None)
        return None

    return read


def _name(layer: Mapping[str, Any]) -> str:
    return str(layer.get("name", "layer"))
