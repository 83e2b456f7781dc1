"""Summary of the runs of a preset: one row per arm, the paper's numbers beside them, and what is still missing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sinkformers.lab.artefacts.artefact import Artefact, ExperimentError, Preset, Record
from sinkformers.lab.reporting.comparison import key, softmax_key
from sinkformers.lab.reporting.metrics import Metric, metric_named
from sinkformers.lab.reporting.records import Found, Unfinished, run_key
from sinkformers.lab.reporting.rows import Row, overhead, row

SMOKE = "smoke"  # a preset on toy data, whose results say nothing about the paper's

# Keys of `paper_numbers` that are no names of arms; True is n_iters = 1.
PAPERS = {True: {"softmax", "transformer"}, False: {"sinkhorn", "sinkformer"}}


@dataclass(frozen=True)
class Summary:
    """One preset of an artefact. `not_begun` is empty for artefacts that are not in the catalogue."""

    artefact: Artefact
    preset: str
    metric: Metric
    rows: tuple[Row, ...]
    records: tuple[Record, ...]
    unfinished: tuple[Unfinished, ...]
    not_begun: tuple[tuple[str, int], ...]  # arm and seed
    paper: Mapping[str, Mapping[str, float]]  # the paper's numbers that belong to no row

    @property
    def scale(self) -> Preset | None:
        return self.artefact.presets.get(self.preset)

    @property
    def is_smoke(self) -> bool:
        return self.preset == SMOKE

    @property
    def floor(self) -> float | None:
        return self.scale.floor if self.scale else None

    @property
    def pairs(self) -> list[tuple[Row, Row]]:
        """Pairs of a SoftMax arm and a Sinkformer arm whose other settings are equal, but those of column steps."""
        softmax = {softmax_key(each.settings): each for each in self.rows if each.n_iters == 1}
        return [
            (softmax[softmax_key(each.settings)], each)
            for each in self.rows
            if each.n_iters != 1 and softmax_key(each.settings) in softmax
        ]

    @property
    def limits(self) -> list[tuple[Row, Row]]:
        """Pairs of the Sinkformer arm with the most iterations and the arm at the limit, other settings equal."""
        finite = {
            key(each.settings): each
            for each in sorted(self.rows, key=lambda row: row.n_iters)
            if 1 < each.n_iters < math.inf
        }
        return [
            (finite[key(each.settings)], each)
            for each in self.rows
            if each.n_iters == math.inf and key(each.settings) in finite
        ]


def summarise(found: Found, find: Callable[[str], Artefact | None] = lambda name: None) -> list[Summary]:
    """Return one summary per artefact and preset that has runs. An artefact that `find` does not know has no title."""
    names = {run_key(record)[:2] for record in found.records} | {begun.key[:2] for begun in found.unfinished}
    return [
        _summary(found, find(name) or Artefact(name=name, title=name, paper=""), name, preset)
        for name, preset in sorted(names)
    ]


def _summary(found: Found, artefact: Artefact, name: str, preset: str) -> Summary:
    records = tuple(record for record in found.records if run_key(record)[:2] == (name, preset))
    unfinished = tuple(begun for begun in found.unfinished if begun.key[:2] == (name, preset))
    arms: dict[str, list[Record]] = {}
    for record in records:
        arms.setdefault(record.metrics["arm"], []).append(record)
    metric = metric_named(_metric(records, f"{name}, {preset}", artefact.metric_of(preset)))
    summary = Summary(
        artefact,
        preset,
        metric,
        tuple(row(arm, runs, metric) for arm, runs in arms.items()),
        records,
        unfinished,
        _not_begun(artefact.presets.get(preset), records, unfinished),
        artefact.paper_numbers if preset != SMOKE else {},
    )
    overheads = {each.arm: overhead(arms[softmax.arm], arms[each.arm]) for softmax, each in summary.pairs}
    labels = Counter(each.label for each in summary.rows)
    rows = tuple(
        replace(
            each,
            label=each.label if labels[each.label] == 1 else f"{each.label} ({each.arm})",
            overhead=overheads.get(each.arm),
            below_floor=_misses(summary.floor, each, metric),
        )
        for each in summary.rows
    )
    return _beside_the_paper(replace(summary, rows=rows))


def _metric(records: Iterable[Record], where: str, expected: str) -> str:
    metrics = {record.metrics["metric"] for record in records} or {expected}
    if len(metrics) > 1:
        raise ExperimentError(
            f"the runs of {where}, measure different things ({', '.join(sorted(metrics))}); report on them separately."
        )
    return metrics.pop()


def _misses(floor: float | None, each: Row, metric: Metric) -> bool:
    return floor is not None and each.n_iters == 1 and metric.is_better(floor, than=each.median)


def _beside_the_paper(summary: Summary) -> Summary:
    """Assign the paper's numbers to rows. Their key is the name of an arm, or a label that fits exactly one arm.

    Arms at the limit have no label: the paper trains none.
    """
    arms = {arm.name: arm.n_iters for arm in summary.scale.arms} if summary.scale else {}
    arms |= {each.arm: each.n_iters for each in summary.rows}
    beside, left = {}, {}
    for name, numbers in summary.paper.items():
        labelled = (arm for arm, n_iters in arms.items() if n_iters != math.inf)
        meant = [name] if name in arms else [arm for arm in labelled if name.casefold() in PAPERS[arms[arm] == 1]]
        if len(meant) == 1:
            beside[meant[0]] = numbers
        else:
            left[name] = numbers
    rows = tuple(replace(each, paper=beside.get(each.arm, {})) for each in summary.rows)
    return replace(summary, rows=rows, paper=left)


def _not_begun(
    preset: Preset | None, records: Iterable[Record], unfinished: Iterable[Unfinished]
) -> tuple[tuple[str, int], ...]:
    if preset is None:
        return ()
    begun = {run_key(record)[2:] for record in records} | {each.key[2:] for each in unfinished}
    return tuple((arm.name, seed) for arm in preset.arms for seed in preset.seeds if (arm.name, seed) not in begun)
