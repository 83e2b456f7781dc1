"""Sentences about a summary: what was found, and what a reader must know about it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from sinkformers.lab.reporting.comparison import count_text, key, side
from sinkformers.lab.reporting.metrics import Metric, metric_named
from sinkformers.lab.reporting.records import configs, number
from sinkformers.lab.reporting.rows import Row
from sinkformers.lab.reporting.summary import Summary

STATISTICS = {"median", "mean", "best", "worst"}
MOST_NAMED = 4  # arms whose missing runs are listed
MOMENTS = 3  # at which columns are compared
UNEVEN = 0.1  # a mean distance of column sums from 1 that is explained


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
    if _is_one_comparison(pairs):
        rows = (pairs[0][0], *(pair[1] for pair in pairs))
        found = "; ".join(_with_spread(summary.metric, each) for each in rows)
        what = "Median test" if any(len(each.values) > 1 for each in rows) else "Test"
        return f"{what} {summary.metric.label}: {found}."
    better, worse, apart = _tally(summary.metric, pairs)
    said = (
        f"Of {len(pairs)} comparisons with SoftMax the Sinkformer has the better median test {summary.metric.label} "
        f"in {better}, the worse in {worse}, the same in {len(pairs) - better - worse}."
    )
    if any(len(row.values) == 1 for pair in pairs for row in pair):
        return said
    return f"{said} In {apart} of them every run of one arm is better than every run of the other."


def _is_one_comparison(pairs: Sequence[tuple[Row, Row]]) -> bool:
    """Whether the pairs are of models that differ in n_iters only, or there is one pair."""
    return len(pairs) == 1 or len({key(row.settings) for pair in pairs for row in pair}) == 1


def _seed_by_seed(summary: Summary) -> list[str]:
    pairs = [pair for pair in summary.pairs if not pair[0].below_floor]
    return [said for pair in pairs if (said := _seeds(summary.metric, *pair))] if _is_one_comparison(pairs) else []


def _seeds(metric: Metric, softmax: Row, sinkformer: Row) -> str:
    """Compare the runs of two arms: those of one seed start from the same weights and see the same batches."""
    shared = sorted(softmax.values.keys() & sinkformer.values.keys())
    if len(shared) < 2:
        return ""
    ahead = sum(metric.is_better(sinkformer.values[seed], than=softmax.values[seed]) for seed in shared)
    behind = sum(metric.is_better(softmax.values[seed], than=sinkformer.values[seed]) for seed in shared)
    equal = len(shared) - ahead - behind
    ties = f" and level in {equal}" if equal else ""
    n_iters = count_text(sinkformer.n_iters)
    said = f"Seed by seed, n_iters = {n_iters} is ahead of SoftMax in {ahead} of {len(shared)}{ties}"
    if metric.is_better(sinkformer.worst, than=softmax.best):
        return f"{said}, and its worst run is better than the best of SoftMax."
    if metric.is_better(softmax.worst, than=sinkformer.best):
        return f"{said}, and its best run is worse than the worst of SoftMax."
    return f"{said}; their ranges overlap."


def notes(summary: Summary) -> list[str]:
    """Return what a reader of the table must know, most important first."""
    return [
        *_seed_by_seed(summary),
        *_toy(summary),
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
    said = (
        f"Column sums of SoftMax attention end nearer to 1 than they were before training in {from_start} of "
        f"{_count(len(moves), 'model')}, and nearer than after the first epoch in {from_first}."
    )
    return " ".join([said, *uneven(summary)])


def uneven(summary: Summary) -> list[str]:
    """Explain columns that are uneven after a finite number of normalisations, where there are such columns."""
    ends = [row for row in summary.rows if 1 < row.n_iters < math.inf and (row.gap or 0) > UNEVEN]
    if not ends:
        return []
    counts = " or ".join(dict.fromkeys(str(row.n_iters) for row in ends))
    gaps = sorted(row.gap for row in ends if row.gap is not None)
    between = f"{gaps[0]:.2f}" if len(gaps) == 1 else f"{gaps[0]:.2f} to {gaps[-1]:.2f}"
    began = [row.columns.gap[0] for row in ends if row.columns.gap[0] is not None]
    softmax = [row.gap for row in summary.rows if row.n_iters == 1 and row.gap is not None]
    found = [f"SoftMax: {softmax[0]:.2f}"] if len(softmax) == 1 else []
    if began and max(began) < gaps[0]:
        found.append("before training " + ("below 0.01" if max(began) < 0.005 else f"at most {max(began):.2f}"))
    beside = f" ({'; '.join(found)})" if found else ""
    said = [
        f"With n_iters = {counts} the columns of trained models are {between} away from 1 on average{beside}: "
        "a finite "
        "number of normalisations makes columns even only as far as the scores are not too sharp, and training "
        "sharpens them. The rows, which come last, sum to 1; at n_iters = ∞ the columns do too."
    ]
    worse = sum(
        1
        for softmax, sinkformer in summary.pairs
        if sinkformer in ends and softmax.gap is not None and (sinkformer.gap or 0) > softmax.gap
    )
    if worse:
        said.append(
            f"In {_count(worse, 'comparison')} SoftMax's own columns are nearer to 1: its attention stayed close to "
            "uniform there, and uniform attention has even columns."
        )
    return said


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
    if not summary.limits or len({key(row.settings) for row in summary.rows}) == 1:
        return []  # one comparison is in the finding
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


def _toy(summary: Summary) -> list[str]:
    if not summary.is_smoke or not summary.artefact.paper:
        return []
    return [
        "A quick check on data that comes with a library or is computed: it shows that everything works, and says "
        "nothing about the paper's results, which are therefore not shown beside it."
    ]


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
        return ["One run of each model: the spread between runs is unknown."]
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
