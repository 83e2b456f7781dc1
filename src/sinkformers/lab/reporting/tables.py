"""Tables of strings from a summary, for the terminal, for Markdown, for CSV and for the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinkformers.lab.reporting.comparison import describe, key, others, side
from sinkformers.lab.reporting.equal_time import readings
from sinkformers.lab.reporting.labels import fact, fact_text
from sinkformers.lab.reporting.records import configs
from sinkformers.lab.reporting.summary import Summary
from sinkformers.lab.reporting.words import paper_numbers

if TYPE_CHECKING:
    import rich.table

NOTHING = "–"
ABOUT = ("machine", "device", "precision", "threads", "processes", "versions", "commit", "resumed", "finished")


@dataclass(frozen=True)
class Table:
    """The first column names its row."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def results(summary: Summary) -> Table:
    """Return statistics of the metric over all runs: one row per arm, with the paper's numbers."""
    text = summary.metric.text
    several = any(len(row.values) > 1 for row in summary.rows)
    spread = {
        "mean": [text(row.mean) for row in summary.rows],
        "best": [text(row.best) for row in summary.rows],
        "worst": [text(row.worst) for row in summary.rows],
    }
    return _filled(
        {
            "model": [row.label + (" (below the floor)" if row.below_floor else "") for row in summary.rows],
            **({"runs": [str(len(row.values)) for row in summary.rows]} if several else {}),
            "before training": [NOTHING if row.start is None else text(row.start) for row in summary.rows],
            "median" if several else f"test {summary.metric.label}": [text(row.median) for row in summary.rows],
            **(spread if several else {}),
            "the paper": [paper_numbers(summary.metric, row.paper) or NOTHING for row in summary.rows],
        }
    )


def costs(summary: Summary) -> Table:
    """Return time per epoch and attention statistics: one row per arm."""
    return _filled(
        {
            "model": [row.label for row in summary.rows],
            "s / epoch": [_or_nothing(row.seconds, ".3g") for row in summary.rows],
            "overhead": [_or_nothing(row.overhead and row.overhead - 1, "+.1%") for row in summary.rows],
            "column gap": [_or_nothing(row.gap, ".3f") for row in summary.rows],
            "marginal error": [_or_nothing(row.error, ".2g") for row in summary.rows],
        }
    )


def equal_time(summary: Summary) -> Table:
    """Return what pairs of arms have reached after equal seconds of training: one row per Sinkformer arm."""
    text = summary.metric.text
    labels = {row.arm: row.label for row in summary.rows}
    rows = (
        (
            labels[each.arm],
            labels[each.softmax_arm],
            f"{each.seconds:.3g}",
            text(each.sinkformer),
            text(each.softmax),
            f"{each.ahead} of {each.seeds}",
        )
        for each in readings(summary)
    )
    return Table(("model", "against", "seconds", "at that time", "SoftMax at that time", "seeds ahead"), tuple(rows))


def columns(summary: Summary) -> Table:
    """Return how column sums change: share of columns within 0.1 of 1 and mean distance from 1, before training,
    after the first epoch and at the end."""
    moments = ("epoch 0", "epoch 1", "end")
    return _filled(
        {"model": [row.label for row in summary.rows]}
        | {
            f"within 0.1, {moment}": [_or_nothing(row.columns.within[place], ".1%") for row in summary.rows]
            for place, moment in enumerate(moments)
        }
        | {
            f"gap, {moment}": [_or_nothing(row.columns.gap[place], ".3f") for row in summary.rows]
            for place, moment in enumerate(moments)
        }
    )


def runs(summary: Summary) -> Table:
    """Return the final value of every run: one row per arm, one column per seed. Unfinished runs are marked."""
    unfinished = {each.key[2:] for each in summary.unfinished}
    seeds = sorted({seed for row in summary.rows for seed in row.values} | {seed for _, seed in unfinished})
    finals = {(row.arm, seed): summary.metric.text(row.values[seed]) for row in summary.rows for seed in row.values}
    labels = {arm: arm for arm, _ in sorted(unfinished)} | {row.arm: row.label for row in summary.rows}
    labels = {row.arm: row.label for row in summary.rows} | labels  # finished arms first
    rows = (
        (label, *(finals.get((arm, seed), "unfinished" if (arm, seed) in unfinished else NOTHING) for seed in seeds))
        for arm, label in labels.items()
    )
    return Table(("model", *(f"seed {seed}" for seed in seeds)), tuple(rows))


def layers(summary: Summary) -> Table:
    """Return attention statistics after training: one row per layer of an arm."""
    headings = ("layer", "model", "column gap", "within 0.1", "row error", "column error")
    rows = (
        (
            layer.name,
            row.label,
            _or_nothing(layer.gap, ".3f"),
            _or_nothing(layer.within, ".1%"),
            _or_nothing(layer.row_error, ".2g"),
            _or_nothing(layer.column_error, ".2g"),
        )
        for row in summary.rows
        for layer in row.layers
    )
    return Table(headings, tuple(rows))


def limit(summary: Summary) -> Table:
    """Return the medians of arms at the limit beside those of fewer iterations: one row per choice of other settings.

    The last column counts the seeds with which the limit is ahead of the most iterations.
    """
    finite = {key(at_the_limit.settings): most for most, at_the_limit in summary.limits}
    medians = {(key(row.settings), row.n_iters): summary.metric.text(row.median) for row in summary.rows}
    counts = sorted({count for settings, count in medians if settings in finite})
    rows = []
    for most, at_the_limit in summary.limits:
        both = sorted(most.values.keys() & at_the_limit.values.keys())
        ahead = sum(summary.metric.is_better(at_the_limit.values[seed], than=most.values[seed]) for seed in both)
        rows.append(
            (
                describe(others(most.settings)) or "all",
                *(medians.get((key(most.settings), count), NOTHING) for count in counts),
                f"{ahead} of {len(both)} (n_iters = {most.n_iters})",
            )
        )
    return Table(("settings", *map(side, counts), "seeds ahead of fewer"), tuple(rows))


def scale(summary: Summary) -> Table:
    """Return configuration, data and environment of the runs, not their settings; several values where runs differ."""
    seen: dict[str, dict[str, None]] = {}
    for record, config in zip(summary.records, configs(summary.records), strict=True):
        about = {name: record.run.get(name) for name in ABOUT}
        trained = {"data": record.metrics.get("data"), **config, "parameters": record.metrics.get("parameters")}
        for name, value in {**trained, **about}.items():
            if value is not None:
                seen.setdefault(name, {}).setdefault(fact_text(name, value))
    rows = (fact(name, _range(values)) if name == "finished" else _facts(name, values) for name, values in seen.items())
    return Table(("what", "value"), tuple(rows))


def comma_separated(summary: Summary) -> str:
    """Return the unrounded numbers as CSV: one row per arm with its settings, statistics and every run by seed."""
    settings = dict.fromkeys(name for row in summary.rows for name in row.settings)
    seeds = sorted({seed for row in summary.rows for seed in row.values})
    statistics = ("start", "median", "mean", "best", "worst", "seconds", "overhead", "gap", "error")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["arm", *settings, "metric", "runs", *statistics, *(f"seed {seed}" for seed in seeds)])
    for row in summary.rows:
        numbers = [getattr(row, name) for name in statistics]
        finals = [row.values.get(seed) for seed in seeds]
        writer.writerow(
            [row.arm, *map(row.settings.get, settings), summary.metric.name, len(row.values), *numbers, *finals]
        )
    return text.getvalue()


def markdown(table: Table) -> str:
    """Return the table in Markdown."""
    lines = [table.headings, ("---",) * len(table.headings), *table.rows]
    return "".join(f"| {' | '.join(_one_line(each) for each in line)} |\n" for line in lines)


def terminal(table: Table, title: str) -> rich.table.Table:
    """Return the table for a terminal. Names that look like markup are printed literally."""
    import rich.table
    from rich import box
    from rich.text import Text

    drawn = rich.table.Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left")
    for place, heading in enumerate(table.headings):
        words = place == 0 or heading == "the paper"
        drawn.add_column(heading, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _filled(columns: Mapping[str, list[str]]) -> Table:
    """Drop columns without any number."""
    kept = {name: cells for name, cells in columns.items() if any(each != NOTHING for each in cells)}
    return Table(tuple(kept), tuple(zip(*kept.values(), strict=True)))


def _or_nothing(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _facts(name: str, values: Iterable[str]) -> tuple[str, str]:
    found = [fact(name, value) for value in values]
    return found[0][0], " or ".join(value for _, value in found)


def _range(values: Iterable[str]) -> str:
    first, last = min(values), max(values)
    return first if first == last else f"{first} to {last}"
