"""Records of runs, read from their folders: finished runs, and the names of unfinished ones.

A run is a folder `<artefact>/<preset>/<arm>/seed-<k>`; it is finished when it holds `metrics.json`. `find` takes any
folder at or above runs: an output folder, an artefact, a preset, an arm, or a single run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkformers.lab.artefacts import record_json
from sinkformers.lab.artefacts.artefact import LOG_FILE, METRICS_FILE, RUN_FILE, ExperimentError, Record
from sinkformers.lab.reporting import record_shape
from sinkformers.lab.reporting.comparison import order

RUN_FOLDER = re.compile(r"seed-(\d+)")


@dataclass(frozen=True, order=True)
class Unfinished:
    """A run without `metrics.json`; its log has so many `epochs`."""

    artefact: str
    preset: str
    arm: str
    seed: int
    epochs: int = 0

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What identifies a run, as `run_key` of a record."""
        return self.artefact, self.preset, self.arm, self.seed


@dataclass(frozen=True)
class Found:
    """All runs below some folders. Records are sorted by artefact, preset, settings and seed."""

    records: tuple[Record, ...]
    unfinished: tuple[Unfinished, ...]


def find(folders: Iterable[Path]) -> Found:
    """Read every run at or below `folders`. A run that is found twice counts once.

    Raises:
        ExperimentError: if a record is damaged, or a run is found twice with different metrics.
    """
    finished: dict[tuple[str, str, str, int], tuple[Path, Record]] = {}
    unfinished: dict[tuple[str, str, str, int], Unfinished] = {}
    for folder in _run_folders(folders):
        if not (folder / METRICS_FILE).exists():
            begun = _unfinished(folder)
            unfinished[begun.key] = max(begun, unfinished.get(begun.key, begun))
            continue
        record = read(folder)
        first, known = finished.setdefault(run_key(record), (folder, record))
        if json.dumps(known.metrics, sort_keys=True) != json.dumps(record.metrics, sort_keys=True):
            raise ExperimentError(
                f"{first / METRICS_FILE} and {folder / METRICS_FILE} are the same run with different results; "
                "report on one of them at a time."
            )
    records = sorted((record for _, record in finished.values()), key=_order)
    return Found(tuple(records), tuple(sorted(unfinished[name] for name in unfinished.keys() - finished.keys())))


def read(folder: Path) -> Record:
    """Read a finished run. `run.json` may be missing: then machine and time are unknown."""
    metrics = _json(folder / METRICS_FILE, record_shape.METRICS)
    test = metrics["epochs"][-1].get("test") or {}
    if metrics["metric"] not in test:
        raise ExperimentError(_no_record(folder / METRICS_FILE, f"its last epoch holds no test {metrics['metric']}"))
    run = _json(folder / RUN_FILE, record_shape.RUN) if (folder / RUN_FILE).exists() else {}
    return Record(metrics, run, folder)


def run_key(record: Record) -> tuple[str, str, str, int]:
    """Return artefact, preset, arm and seed, which identify a run."""
    metrics = record.metrics
    return metrics["artefact"], metrics["preset"], metrics["arm"], metrics["seed"]


def value(record: Record) -> float:
    """Return the final value of the record's metric; NaN if training diverged."""
    final = number(record.final["test"], record.metrics["metric"])
    assert final is not None
    return final if math.isfinite(final) else math.nan


def configs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the leaves of each config, without those that are settings of any arm: what all arms should share."""
    settings = {name for record in records for name in record.metrics["settings"]}
    found = [_leaves(record.metrics.get("config") or {}) for record in records]
    return [{name: each for name, each in leaves.items() if name not in settings} for leaves in found]


def number(values: Mapping[str, Any] | None, name: str) -> float | None:
    """Return `values[name]`, or None if it was not measured. JSON has no NaN: null means NaN."""
    if not values or name not in values:
        return None
    return math.nan if values[name] is None else float(values[name])


def _leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, each in values.items():
        found |= _leaves(each) if isinstance(each, dict) else {name: each}
    return found


def _order(record: Record) -> tuple[Any, ...]:
    artefact, preset, arm, seed = run_key(record)
    return artefact, preset, order(record), arm, seed


def _run_folders(folders: Iterable[Path]) -> list[Path]:
    found = []
    for folder in folders:
        if not folder.is_dir():
            reason = "is not a folder" if folder.exists() else "does not exist"
            raise ExperimentError(f"{folder} {reason}; name a folder that holds runs.")
        below = (path for path in folder.rglob("seed-*") if path.is_dir())
        found += sorted(path for path in [folder.resolve(), *below] if RUN_FOLDER.fullmatch(path.name))
    return found


def _unfinished(folder: Path) -> Unfinished:
    artefact, preset, arm, seed = ("", "", "", *folder.resolve().parts)[-4:]
    log = folder / LOG_FILE
    # A line that is being written has no line break yet; the first line is before training.
    epochs = max(0, log.read_bytes().count(b"\n") - 1) if log.exists() else 0
    return Unfinished(artefact, preset, arm, int(seed.removeprefix("seed-")), epochs)


def _json(file: Path, shape: record_shape.Object) -> dict[str, Any]:
    try:
        content = record_json.loads(file.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # lone surrogates can be read, but not printed
    except (OSError, ValueError, RecursionError) as error:
        raise ExperimentError(f"{file} cannot be read: {error}. Repair it, or delete it and train again.") from error
    fault = record_shape.fault(content, shape)
    if fault:
        raise ExperimentError(_no_record(file, fault))
    return content


def _no_record(file: Path, fault: str) -> str:
    return f"{file} is no record of a run: {fault}. Delete it and train again."
