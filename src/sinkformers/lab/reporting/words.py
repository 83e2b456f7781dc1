"""Sentences about a summary: what was found, and what a reader must know about it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping

from sinkformers.lab.reporting.comparison import side
from sinkformers.lab.reporting.metrics import Metric, metric_named
from sinkformers.lab.reporting.records import configs, number
from sinkformers.lab.reporting.rows import Row
from sinkformers.lab.reporting.summary import Summary

STATISTICS = {"median", "mean", "best", "worst"}
MOST_NAMED = 4  # arms whose missing runs are listed
MOMENTS = 3  # at which columns are compared


def paper_numbers(metric: Metric, numbers: Mapping[str, float]) -> str:
    """Return the paper's numbers for one arm as text, such as `median 79.0%, best 80.0%`."""
    return ", ".join(
        f"{name} {metric.paper_text(value) if name in STATISTICS else f'{value:.4g}'}"
        for name, value in numbers.items()
    )


def finding(summary: Summary) -> str:
    """Say what the runs show about arms that differ only in n_iters."""
    pairs = [(softmax, sinkformer) for softmax, sinkformer in summary.pairs if not softmax.below_floor]
    if not summary.rows:
        return "No run is finished yet."
    if not pairs and summary.pairs:
        return "The arms are not comparable yet: no SoftMax arm reaches the floor."
    if not pairs:
        return (
            "Nothing can be compared yet: it takes a SoftMax arm and a Sinkformer arm whose other settings are equal."
        )
    if len(pairs) == 1:
        found = "; ".join(_with_spread(summary.metric, each) for each in pairs[0])
        return f"Median test {summary.metric.label}: {found}."
    better, worse, apart = _tally(summary.metric, pairs)
    said = (
        f"Of {len(pairs)} comparisons with SoftMax the Sinkformer has the better median test {summary.metric.label} "
        f"in {better}, the worse in {worse}, the same in {len(pairs) - better - worse}."
    )
    if any(len(row.values) == 1 for pair in pairs for row in pair):
        return said
    return f"{said} In {apart} of them every run of one arm is better than every run of the other."


def notes(summary: Summary) -> list[str]:
    """Return what a reader of the table must know, most important first."""
    return [
        *_limit(summary),
        *_floor(summary),
        *_missing(summary),
        *_drift(summary),
        *_one_run(summary),
        *_paper_only(summary),
        *_signatures(summary),
    ]


def trend(summary: Summary) -> str:
    """Say how the column sums of SoftMax attention change during training; empty if they were not measured."""
    rows = [row.columns.gap for row in summary.rows if row.n_iters == 1]
    moves = [gap for gap in ([each for each in gap if each is not None] for gap in rows) if len(gap) == MOMENTS]
    if not moves:
        return ""
    from_start, from_first = (sum(gap[-1] < gap[place] for gap in moves) for place in (0, 1))
    return (
        f"Column sums of SoftMax attention end nearer to 1 than they were before training in {from_start} of "
        f"{_count(len(moves), 'arm')}, and nearer than after the first epoch in {from_first}."
    )


def _with_spread(metric: Metric, row: Row) -> str:
    low, high = (metric.text(each) for each in sorted((row.best, row.worst)))
    runs = f"{len(row.values)} runs, {low} to {high}" if len(row.values) > 1 else "1 run"
    return f"{side(row.n_iters)} {metric.text(row.median)} ({runs})"


def _tally(metric: Metric, pairs: Iterable[tuple[Row, Row]]) -> tuple[int, int, int]:
    """Count the pairs in which the Sinkformer is better, is worse, and in which the runs do not overlap."""
    better = worse = apart = 0
    for softmax, sinkformer in pairs:
        better += metric.is_better(sinkformer.median, than=softmax.median)
        worse += metric.is_better(softmax.median, than=sinkformer.median)
        apart += metric.is_better(sinkformer.worst, than=softmax.best)
        apart += metric.is_better(softmax.worst, than=sinkformer.best)
    return better, worse, apart


def _limit(summary: Summary) -> list[str]:
    """Compare arms at the limit with the arms of the most iterations."""
    if not summary.limits:
        return []
    better, worse, apart = _tally(summary.metric, summary.limits)
    counts = " or ".join(dict.fromkeys(str(finite.n_iters) for finite, _ in summary.limits))
    comparisons = _count(len(summary.limits), "comparison")
    said = (
        f"In {comparisons} with n_iters = {counts} the limit, n_iters = ∞, has the better median test "
        f"{summary.metric.label} {_times(better)}, the worse {_times(worse)}."
    )
    if any(len(row.values) == 1 for pair in summary.limits for row in pair):
        return [said]
    return [f"{said} Every run of one arm is better than every run of the other {_times(apart)}."]


def _floor(summary: Summary) -> list[str]:
    missed = [row for row in summary.rows if row.below_floor]
    if not missed or summary.floor is None:
        return []
    arms = ", ".join(f"{row.arm} (median {summary.metric.text(row.median)})" for row in missed)
    return [
        f"Not comparable yet: SoftMax must reach a test {summary.metric.label} of "
        f"{summary.metric.text(summary.floor)} before arms are compared, and these do not: {arms}."
    ]


def _missing(summary: Summary) -> list[str]:
    found = []
    if summary.unfinished:
        runs = ", ".join(
            f"{each.arm} seed {each.seed} ({_count(each.epochs, 'epoch')} done)" for each in summary.unfinished
        )
        found.append(f"Unfinished and not in the numbers: {runs}.")
    if summary.not_begun:
        seeds: dict[str, list[str]] = {}
        for arm, seed in summary.not_begun:
            seeds.setdefault(arm, []).append(str(seed))
        named = [f"{arm} seed {' '.join(each)}" for arm, each in seeds.items()]
        more = f", and {_count(len(named) - MOST_NAMED, 'more arm')}" if len(named) > MOST_NAMED else ""
        runs = f"{', '.join(named[:MOST_NAMED])}{more}"
        found.append(f"Not begun: {_count(len(summary.not_begun), 'run')} of this preset ({runs}).")
    return found


def _drift(summary: Summary) -> list[str]:
    """Report runs of a preset that do not share their config or their data: their arms differ in more than settings."""
    found = []
    data = [record.metrics.get("data") or {} for record in summary.records]
    for part, each_run in (("config", configs(summary.records)), ("data", data)):
        values: dict[str, set[str]] = {}
        for name, value in (item for run in each_run for item in run.items()):
            values.setdefault(name, set()).add(json.dumps(value, ensure_ascii=False))
        differing = [f"{name} ({', '.join(sorted(each))})" for name, each in values.items() if len(each) > 1]
        if differing:
            found.append(f"The runs do not share their {part}: {'; '.join(differing)}.")
    return found


def _one_run(summary: Summary) -> list[str]:
    if summary.rows and max(len(row.values) for row in summary.rows) == 1:
        return ["One run per arm: the spread between runs is unknown."]
    return []


def _paper_only(summary: Summary) -> list[str]:
    if not summary.paper:
        return []
    numbers = "; ".join(f"{name}: {paper_numbers(summary.metric, each)}" for name, each in summary.paper.items())
    return [f"The paper's numbers that belong to no single arm here: {numbers}."]


def _signatures(summary: Summary) -> list[str]:
    """Say how scores were counted, if the records hold it; with the medians of scores that are in no table."""
    data = [record.metrics.get("data") or {} for record in summary.records]
    found = {item: None for each in data for item in (each.get("signatures") or {}).items()}
    tested = " or ".join(dict.fromkeys(str(each["tested"]) for each in data if "tested" in each))
    said = []
    for name, signature in found:
        beside = "" if name == summary.metric.name else f", medians {', '.join(_medians(summary, name))}"
        said.append(
            f"How {metric_named(name).label} was counted{f' on {tested}' if tested else ''}: {signature}{beside}."
        )
    return said


def _medians(summary: Summary, name: str) -> list[str]:
    finals: dict[str, list[float]] = {}
    for record in summary.records:
        final = number(record.final["test"], name)
        if final is not None:
            finals.setdefault(record.metrics["arm"], []).append(final)
    metric = metric_named(name)
    return [f"{metric.text(statistics.median(metric.ranked(each)))} ({arm})" for arm, each in finals.items()]


def _times(n: int) -> str:
    return _count(n, "time")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
