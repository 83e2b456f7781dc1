"""A second reading of the same curves: arms compared after equal seconds of training instead of equal steps."""

from __future__ import annotations

import math
import statistics
from itertools import accumulate
from typing import NamedTuple

from sinkformers.lab.artefacts.artefact import Record
from sinkformers.lab.reporting.records import number
from sinkformers.lab.reporting.rows import environment
from sinkformers.lab.reporting.summary import Summary


class Reading(NamedTuple):
    """A SoftMax arm and a Sinkformer arm when the faster of two runs with one seed ends; medians over seeds."""

    softmax_arm: str
    arm: str
    seconds: float
    softmax: float
    sinkformer: float
    ahead: int  # seeds with which the Sinkformer is better
    seeds: int


def readings(summary: Summary) -> list[Reading]:
    """Return one reading per pair of arms that have seeds in common, timed in the same environment."""
    runs = {(record.metrics["arm"], record.metrics["seed"]): record for record in summary.records}
    found = []
    for softmax, sinkformer in summary.pairs:
        seeds = sorted(softmax.values.keys() & sinkformer.values.keys())
        both = [(runs[softmax.arm, seed], runs[sinkformer.arm, seed]) for seed in seeds]
        both = [pair for pair in both if environment(pair[0]) == environment(pair[1]) and all(map(total, pair))]
        if not both:
            continue
        times = [min(map(total, pair)) for pair in both]
        values = [[at(run, time) for run in pair] for pair, time in zip(both, times, strict=True)]
        ahead = sum(summary.metric.is_better(each, than=other) for other, each in values)
        ours, theirs = (statistics.median(summary.metric.ranked(side)) for side in zip(*values, strict=True))
        found.append(
            Reading(softmax.arm, sinkformer.arm, statistics.median(times), ours, theirs, ahead, len(both)),
        )
    return found


def total(run: Record) -> float:
    """Return the seconds of training; 0 if those of an epoch are unknown."""
    seconds = run.run.get("seconds_per_epoch") or []
    return sum(seconds) if len(seconds) == len(run.metrics["epochs"]) - 1 else 0.0


def at(run: Record, seconds: float) -> float:
    """Return the metric after so many seconds of training, by linear interpolation between epochs."""
    ends = list(accumulate(run.run["seconds_per_epoch"], initial=0.0))
    values = [number(epoch.get("test"), run.metrics["metric"]) for epoch in run.metrics["epochs"]]
    last = max(1, next((place for place, end in enumerate(ends) if end >= seconds), len(ends) - 1))
    before, after = (math.nan if value is None else value for value in values[last - 1 : last + 1])
    share = (seconds - ends[last - 1]) / (ends[last] - ends[last - 1])
    return before + min(1.0, share) * (after - before)
