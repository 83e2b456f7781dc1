"""Records: JSON lines, one per measurement, each with the machine, the versions and the commit it was made with."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measurement import Measurement

FOLDER = Path(__file__).parent / "records"
DOCTOR = "doctor: "
"""What the suite of a record of `sinkformers doctor` begins with; the name of the device follows."""
Newest = dict[str, tuple["Run", list[Measurement]]]


@dataclass(frozen=True)
class Run:
    """What all measurements of one command share. `started` is an ISO date and time, which sorts as time does."""

    started: str
    command: str
    quick: bool
    rows: list[str] | None
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    dirty: bool

    @property
    def full(self) -> bool:
        """Whether no option shortened the run or left out rows."""
        return not self.quick and self.rows is None

    def file(self, folder: Path) -> Path:
        cpu = re.sub(r"[^a-z0-9]+", "-", str(self.machine["cpu"]).lower()).strip("-")
        return folder / f"{self.started[:10]}-{cpu or 'unknown'}.jsonl"


def append(run: Run, measurement: Measurement, folder: Path = FOLDER) -> None:
    """Write a measurement at once, so that a run that is stopped keeps what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    with run.file(folder).open("a", encoding="utf-8") as file:
        file.write(json.dumps(run.__dict__ | measurement.to_json(), ensure_ascii=False) + "\n")


def read(folder: Path = FOLDER) -> list[tuple[Run, Measurement]]:
    records = []
    for file in sorted([*folder.glob("*.jsonl"), *folder.glob("*.json")]):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                data = json.loads(line)
                run = Run(**{name: data[name] for name in Run.__dataclass_fields__})
                records.append((run, Measurement.from_json(data)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file.name}, line {number}, is no record: {error}. Repair or delete it.") from error
    return records


def newest(records: Iterable[tuple[Run, Measurement]]) -> Newest:
    """Return for each suite its newest full run, or its newest quick or partial one if it has no other."""
    by_suite: dict[str, dict[tuple[bool, str], tuple[Run, list[Measurement]]]] = {}
    for run, measurement in records:
        runs = by_suite.setdefault(measurement.suite, {})
        runs.setdefault((run.full, run.started), (run, []))[1].append(measurement)
    return {suite: runs[max(runs)] for suite, runs in by_suite.items()}
