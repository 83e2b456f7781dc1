"""One row of the results: the final values of all runs of one arm, and their statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinkformers.lab.artefacts.artefact import Record
from sinkformers.lab.reporting.comparison import describe, others, side
from sinkformers.lab.reporting.metrics import Metric
from sinkformers.lab.reporting.records import number, value

# Times are compared only between runs that agree in all of these.
ENVIRONMENT = ("machine", "device", "precision", "processes", "threads")


@dataclass(frozen=True)
class Layer:
    """A layer after training: column statistics are medians over runs, marginal errors are those of the worst run."""

    name: str
    gap: float | None
    within: float | None
    row_error: float | None
    column_error: float | None

    @property
    def error(self) -> float | None:
        return max((each for each in (self.row_error, self.column_error) if each is not None), default=None)


@dataclass(frozen=True)
class Columns:
    """Distance of column sums from 1 before training, after the first epoch and at the end: medians over runs."""

    gap: tuple[float | None, ...]
    within: tuple[float | None, ...]


@dataclass(frozen=True)
class Row:
    """An arm: the final value of each of its runs by seed, and their statistics. A run that diverged is the worst."""

    arm: str
    label: str  # the arm in words, different for all rows of a summary
    settings: Mapping[str, Any]
    values: Mapping[int, float]
    median: float
    mean: float
    best: float
    worst: float
    start: float | None  # median before training, of runs that start from a trained model
    seconds: float | None  # per epoch
    columns: Columns
    layers: tuple[Layer, ...]
    overhead: float | None = None  # seconds as a multiple of the SoftMax arm's
    paper: Mapping[str, float] = field(default_factory=dict)
    below_floor: bool = False

    @property
    def n_iters(self) -> int | float:
        return self.settings["n_iters"]

    @property
    def gap(self) -> float | None:
        """The column gap at the end of training."""
        return self.columns.gap[-1]

    @property
    def error(self) -> float | None:
        """The largest marginal error of all layers."""
        return max((layer.error for layer in self.layers if layer.error is not None), default=None)


def row(arm: str, runs: Sequence[Record], metric: Metric) -> Row:
    """Summarise all runs of an arm; none is left out."""
    values = metric.ranked(map(value, runs))
    settings = runs[0].metrics["settings"]
    return Row(
        arm=arm,
        label=", ".join(filter(None, (side(settings["n_iters"]), describe(others(settings))))),
        settings=settings,
        values={run.metrics["seed"]: final for run, final in zip(runs, values, strict=True)},
        median=statistics.median(values),
        mean=statistics.fmean(values),
        best=metric.best(values),
        worst=metric.worst(values),
        start=_over(statistics.median, [_at_the_start(run) for run in runs], metric.name),
        seconds=seconds_per_epoch(runs),
        columns=_columns(runs),
        layers=_layers(runs),
    )


def _at_the_start(run: Record) -> Mapping[str, Any]:
    """Return what a run that starts from a trained model measured before training. For a randomly initialised model
    these values are of no interest, and nothing is returned."""
    return run.metrics["epochs"][0].get("test") or {} if run.is_continued else {}


def seconds_per_epoch(runs: Iterable[Record]) -> float | None:
    """Return the median over all epochs of all runs."""
    seconds = [each for run in runs for each in run.run.get("seconds_per_epoch") or []]
    return statistics.median(seconds) if seconds else None


def overhead(softmax: Sequence[Record], sinkformer: Sequence[Record]) -> float | None:
    """Return the time per epoch of the Sinkformer divided by that of SoftMax, timed in the same environment.

    If both were timed in several environments, the median of the ratios is returned.
    """
    ratios = []
    for place in {environment(run) for run in softmax} & {environment(run) for run in sinkformer}:
        ours, theirs = (
            seconds_per_epoch(run for run in runs if environment(run) == place) for runs in (sinkformer, softmax)
        )
        if ours and theirs:
            ratios.append(ours / theirs)
    return statistics.median(ratios) if ratios else None


def environment(run: Record) -> str:
    """Return where a run was timed, as a key."""
    return repr([run.run.get(name) for name in ENVIRONMENT])


def _columns(runs: Sequence[Record]) -> Columns:
    first = min(1, *(len(run.metrics["epochs"]) - 1 for run in runs))
    moments = [[run.metrics["epochs"][moment].get("columns") or {} for run in runs] for moment in (0, first, -1)]
    gap, within = (
        tuple(_over(statistics.median, moment, name) for moment in moments) for name in ("gap", "within_0.1")
    )
    return Columns(gap, within)


def _layers(runs: Iterable[Record]) -> tuple[Layer, ...]:
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for layer in run.final.get("layers") or []:
            by_name.setdefault(str(layer.get("name", "")), []).append(layer)
    return tuple(
        Layer(
            name,
            gap=_over(statistics.median, each, "gap"),
            within=_over(statistics.median, each, "within_0.1"),
            row_error=_over(max, each, "row_error"),
            column_error=_over(max, each, "column_error"),
        )
        for name, each in by_name.items()
    )


def _over(fold: Callable[[list[float]], float], measured: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Apply `fold` to the values called `name`. Missing values are skipped; one NaN makes the result NaN."""
    present = [each for each in (number(each, name) for each in measured) if each is not None]
    if not present:
        return None
    return math.nan if any(map(math.isnan, present)) else fold(present)
