"""Cells read back from their folders: what is finished, and the names of those that are not.

A cell is a folder `<artefact>/<preset>/<arm>/seed-<k>`; it is finished when it holds `metrics.json`. `find` takes any
folder at or above cells: an output folder, an artefact, a preset, an arm, or a single cell.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkformers.lab.artefacts.artefact import LOG, METRICS, RUN, ExperimentError, Record
from sinkformers.lab.reporting import record_shape
from sinkformers.lab.reporting.comparison import order

CELL = re.compile(r"seed-(\d+)")


@dataclass(frozen=True, order=True)
class Unfinished:
    """A cell without `metrics.json`: so many `epochs` are done, says its log."""

    artefact: str
    preset: str
    arm: str
    seed: int
    epochs: int = 0

    @property
    def cell(self) -> tuple[str, str, str, int]:
        return self.artefact, self.preset, self.arm, self.seed


@dataclass(frozen=True)
class Found:
    """All cells below some folders; the records are sorted by artefact, preset, settings and seed."""

    records: tuple[Record, ...]
    unfinished: tuple[Unfinished, ...]


def find(folders: Iterable[Path]) -> Found:
    """Read every cell at or below `folders`. The same cell twice is one, unless its metrics differ."""
    finished: dict[tuple[str, str, str, int], tuple[Path, Record]] = {}
    unfinished: dict[tuple[str, str, str, int], Unfinished] = {}
    for folder in _cells(folders):
        if not (folder / METRICS).exists():
            begun = _unfinished(folder)
            unfinished[begun.cell] = max(begun, unfinished.get(begun.cell, begun))
            continue
        record = read(folder)
        first, known = finished.setdefault(cell(record), (folder, record))
        if json.dumps(known.metrics, sort_keys=True) != json.dumps(record.metrics, sort_keys=True):
            raise ExperimentError(
                f"{first / METRICS} and {folder / METRICS} are the same cell with different results; "
                "report on one of them at a time."
            )
    records = sorted((record for _, record in finished.values()), key=_order)
    return Found(tuple(records), tuple(sorted(unfinished[name] for name in unfinished.keys() - finished.keys())))


def read(folder: Path) -> Record:
    """A finished cell. `run.json` may be missing: then nothing is known of its machine and its time."""
    metrics = _json(folder / METRICS, record_shape.METRICS)
    test = metrics["epochs"][-1].get("test") or {}
    if metrics["metric"] not in test:
        raise ExperimentError(_no_record(folder / METRICS, f"its last epoch holds no test {metrics['metric']}"))
    run = _json(folder / RUN, record_shape.RUN) if (folder / RUN).exists() else {}
    return Record(metrics, run)


def cell(record: Record) -> tuple[str, str, str, int]:
    """What makes two records the same cell."""
    metrics = record.metrics
    return metrics["artefact"], metrics["preset"], metrics["arm"], metrics["seed"]


def value(record: Record) -> float:
    """The final value of the record's metric; NaN where training diverged, to infinity too."""
    final = number(record.final["test"], record.metrics["metric"])
    assert final is not None
    return final if math.isfinite(final) else math.nan


def configs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What the arms of a preset share: the leaves of each config, without what the settings of any arm name."""
    settings = {name for record in records for name in record.metrics["settings"]}
    found = [_leaves(record.metrics.get("config") or {}) for record in records]
    return [{name: each for name, each in leaves.items() if name not in settings} for leaves in found]


def number(values: Mapping[str, Any] | None, name: str) -> float | None:
    """`values[name]`, or None where nothing was measured; a null is a NaN that JSON could not hold."""
    if not values or name not in values:
        return None
    return math.nan if values[name] is None else float(values[name])


def _leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, each in values.items():
        found |= _leaves(each) if isinstance(each, dict) else {name: each}
    return found


def _order(record: Record) -> tuple[Any, ...]:
    artefact, preset, arm, seed = cell(record)
    return artefact, preset, order(record), arm, seed


def _cells(folders: Iterable[Path]) -> list[Path]:
    found = []
    for folder in folders:
        if not folder.is_dir():
            reason = "is not a folder" if folder.exists() else "does not exist"
            raise ExperimentError(f"{folder} {reason}; name a folder that holds cells.")
        below = (path for path in folder.rglob("seed-*") if path.is_dir())
        found += sorted(path for path in [folder.resolve(), *below] if CELL.fullmatch(path.name))
    return found


def _unfinished(folder: Path) -> Unfinished:
    artefact, preset, arm, seed = ("", "", "", *folder.resolve().parts)[-4:]
    log = folder / LOG
    # A line that is being written has no end yet, and the first is of before training.
    epochs = max(0, log.read_bytes().count(b"\n") - 1) if log.exists() else 0
    return Unfinished(artefact, preset, arm, int(seed.removeprefix("seed-")), epochs)


def _json(file: Path, shape: record_shape.Object) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # half a character can be read, and not be printed
    except (OSError, ValueError, RecursionError) as error:
        raise ExperimentError(f"{file} cannot be read: {error}. Repair it, or delete it and train again.") from error
    fault = record_shape.fault(content, shape)
    if fault:
        raise ExperimentError(_no_record(file, fault))
    return content


def _no_record(file: Path, fault: str) -> str:
    return f"{file} is no record of a run: {fault}. Delete it and train again."
