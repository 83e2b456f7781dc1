"""What the runs of one arm come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinkformers.lab.artefacts.artefact import Record
from sinkformers.lab.reporting.records import number, value

LOWER_IS_BETTER = {"loss", "perplexity", "error"}
PLACE = ("machine", "device", "precision", "processes", "threads")  # what must agree before times are compared


@dataclass(frozen=True)
class Layer:
    """A layer after training: medians over runs of what its columns receive, the worst run of its marginals."""

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
    """How far column sums are from even before training, after the first epoch and at the end: medians over runs."""

    gap: tuple[float | None, ...]
    within: tuple[float | None, ...]


@dataclass(frozen=True)
class Row:
    """An arm: the final value of each of its runs by seed, and what they come to. A run that diverged is the worst."""

    arm: str
    settings: Mapping[str, Any]
    values: Mapping[int, float]
    median: float
    mean: float
    best: float
    worst: float
    start: float | None  # median before training, of runs that go on with a trained model
    seconds: float | None  # an epoch
    columns: Columns
    layers: tuple[Layer, ...]
    overhead: float | None = None  # seconds as a multiple of the SoftMax arm's
    paper: Mapping[str, float] = field(default_factory=dict)
    below_floor: bool = False

    @property
    def n_iters(self) -> int:
        return self.settings["n_iters"]

    @property
    def gap(self) -> float | None:
        """At the end."""
        return self.columns.gap[-1]

    @property
    def error(self) -> float | None:
        """The worst marginal error of a layer."""
        return max((layer.error for layer in self.layers if layer.error is not None), default=None)


def row(arm: str, runs: Sequence[Record], metric: str) -> Row:
    """All runs of an arm, none left out."""
    lower = metric in LOWER_IS_BETTER
    values = ranked(metric, map(value, runs))
    return Row(
        arm=arm,
        settings=runs[0].metrics["settings"],
        values={run.metrics["seed"]: final for run, final in zip(runs, values, strict=True)},
        median=statistics.median(values),
        mean=statistics.fmean(values),
        best=min(values) if lower else max(values),
        worst=max(values) if lower else min(values),
        start=_over(statistics.median, [_at_the_start(run) for run in runs], metric),
        seconds=seconds_per_epoch(runs),
        columns=_columns(runs),
        layers=_layers(runs),
    )


def ranked(metric: str, finals: Iterable[float]) -> list[float]:
    """Final values of runs, such that one that diverged is worse than any that did not."""
    diverged = math.inf if metric in LOWER_IS_BETTER else -math.inf
    return [final if math.isfinite(final) else diverged for final in finals]


def _at_the_start(run: Record) -> Mapping[str, Any]:
    """What a run that goes on with another's model measured before it trained; a model that is only drawn measures
    nothing of interest."""
    return run.metrics["epochs"][0].get("test") or {} if run.goes_on else {}


def seconds_per_epoch(runs: Iterable[Record]) -> float | None:
    """The median over all epochs of all runs."""
    seconds = [each for run in runs for each in run.run.get("seconds_per_epoch") or []]
    return statistics.median(seconds) if seconds else None


def overhead(softmax: Sequence[Record], sinkformer: Sequence[Record]) -> float | None:
    """An epoch of the Sinkformer as a multiple of one of SoftMax, both timed in one place; of several, the median."""
    ratios = []
    for place in {_place(run) for run in softmax} & {_place(run) for run in sinkformer}:
        ours, theirs = (
            seconds_per_epoch(run for run in runs if _place(run) == place) for runs in (sinkformer, softmax)
        )
        if ours and theirs:
            ratios.append(ours / theirs)
    return statistics.median(ratios) if ratios else None


def _place(run: Record) -> str:
    return repr([run.run.get(name) for name in PLACE])


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
    """`fold` of what is there under `name`; one NaN makes NaN, wherever it stands."""
    present = [each for each in (number(each, name) for each in measured) if each is not None]
    if not present:
        return None
    return math.nan if any(map(math.isnan, present)) else fold(present)
