"""Figures of final values: against a setting, and per arm. Every run is a dot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinkformers.lab.artefacts.artefact import ExperimentError, Record
from sinkformers.lab.reporting.comparison import comparisons, count_text, describe, others, rank, side
from sinkformers.lab.reporting.metrics import metric_named
from sinkformers.lab.reporting.panels import (
    INK,
    RULE,
    SINKHORN,
    colours,
    grid,
    in_units,
    is_narrow,
    legend,
    plain,
    share,
    title,
    wrapped,
)
from sinkformers.lab.reporting.records import value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def against(records: Sequence[Record], setting: str, *, label: str = "") -> Figure:
    """Draw final values against one setting: a panel per choice of the other settings, a line per n_iters through the
    medians. Against n_iters itself there is one line. `label` names the axis."""
    lines: dict[str, dict[int | float, dict[Any, list[float]]]] = {}
    for comparison in comparisons(record for record in records if setting in record.metrics["settings"]):
        rest = describe({name: each for name, each in comparison.settings.items() if name != setting})
        for n_iters, runs in comparison.sides.items():
            count, place = (0, n_iters) if setting == "n_iters" else (n_iters, comparison.settings[setting])
            lines.setdefault(rest, {}).setdefault(count, {})[place] = [value(run) for run in runs]
    if not lines:
        raise ExperimentError(f"no run has the setting {setting}.")
    metric = metric_named(records[0].metrics["metric"])
    counts = [count for panel in lines.values() for count in panel]
    colour: dict[int | float, str] = {0: SINKHORN[0]} if setting == "n_iters" else colours(counts)
    # Equally spaced: sizes and rates often double, and would crowd on one side of a linear scale.
    places = sorted({place for panel in lines.values() for line in panel.values() for place in line}, key=rank)
    figure, panels = wrapped(len(lines), 1, height=3.2)
    for axes, (rest, panel) in zip(panels, lines.items(), strict=True):
        for count, line in panel.items():
            _draw_line(axes, {places.index(place): finals for place, finals in line.items()}, colour[count])
        axes.set_xticks(range(len(places)), [plain(count_text(place)) for place in places])
        axes.set_xlabel(plain(label or setting), fontsize=10, color=INK)
        title(axes, f"test {metric.label}", rest)
        in_units(axes.yaxis, metric)
    share(panels)
    if setting != "n_iters":
        legend(figure, counts)
    return figure


def final_values(records: Sequence[Record]) -> Figure:
    """Draw one line per arm: a dot is a run, the bar is the median."""
    arms = {
        (comparison.label, n_iters): [value(run) for run in runs]
        for comparison in comparisons(records)
        for n_iters, runs in comparison.sides.items()
    }
    colour = colours(n_iters for _, n_iters in arms)
    figure, [[axes]] = grid(1, 1, height=0.6 + (0.55 if is_narrow() else 0.34) * len(arms))
    if not is_narrow():
        figure.set_figwidth(8.4)
    for place, ((_, n_iters), finals) in enumerate(arms.items()):
        axes.plot(finals, [place] * len(finals), "o", color=colour[n_iters], alpha=0.55, markeredgewidth=0)
        axes.plot([_middle(finals)], [place], "|", color=INK, markersize=15, markeredgewidth=1.8)
    labels = [("\n" if is_narrow() else ", ").join(filter(None, (side(n_iters), label))) for label, n_iters in arms]
    axes.set_yticks(range(len(arms)), list(map(plain, labels)))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    metric = metric_named(records[0].metrics["metric"])
    axes.set_xlabel(plain(f"test {metric.label}"), fontsize=10, color=INK)
    in_units(axes.xaxis, metric)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    return figure


def swept(records: Iterable[Record]) -> str | None:
    """Return the setting to draw against: the one with most values, if it has three or more and all are numbers."""
    values: dict[str, set[float]] = {}
    for record in records:
        settings = record.metrics["settings"]
        for name in (*others(settings), "n_iters"):
            number = isinstance(settings[name], int | float)
            values.setdefault(name, set()).add(settings[name] if number else math.nan)
    numbers = {name: each for name, each in values.items() if len(each) > 2 and not any(map(math.isnan, each))}
    return max(numbers, key=lambda name: len(numbers[name]), default=None)


def _draw_line(axes: Axes, finals: Mapping[int, list[float]], colour: str) -> None:
    dots = [(place, final) for place, runs in finals.items() for final in runs]
    axes.plot(*zip(*dots, strict=True), "o", color=colour, alpha=0.45, markersize=5, markeredgewidth=0)
    places = sorted(finals)
    medians = [_middle(finals[place]) for place in places]
    axes.plot(places, medians, color=colour, linewidth=2.2, marker="_" if len(places) == 1 else "", markersize=14)


def _middle(finals: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, finals)) else statistics.median(finals)
