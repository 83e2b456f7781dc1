"""The same training is not done twice: a run that another artefact has finished is taken over.

A panel of Figure 2 watches models that Table 1, Table 2 or Figure 6 train as well. A training is determined by its
seed, its configuration and its data, to the last bit, so that the record of the one is that of the other under its own
name; `run.json` says whose it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinkformers.lab.artefacts.artefact import LOG_FILE, METRICS_FILE, RUN_FILE, Run
from sinkformers.lab.workbench import checkpoint


def copy_run(run: Run, folder: Path, twin: Path, out: Path) -> None:
    """Fill a run's folder from that of its twin."""
    metrics = json.loads((twin / METRICS_FILE).read_bytes())
    own = {"artefact": run.artefact, "preset": run.preset, "arm": run.arm.name, "settings": dict(run.arm.settings)}
    run = {**json.loads((twin / RUN_FILE).read_bytes()), "same_as": twin.relative_to(out).as_posix()}
    for file in sorted(twin.iterdir()):
        if file.is_file() and file.name not in (METRICS_FILE, RUN_FILE, LOG_FILE):
            checkpoint.replace(folder / file.name, file.read_bytes())
    checkpoint.replace(folder / RUN_FILE, json_bytes(run))
    checkpoint.replace(folder / METRICS_FILE, json_bytes({**metrics, **own}))


def find_identical(
    out: Path, artefacts: Sequence[str], identity: Mapping[str, Any], where: Mapping[str, Any]
) -> Path | None:
    """The folder of a finished run of `artefacts` below `out` with the same identity but for its settings, trained in
    the same circumstances `where`; None if there is no such run."""
    wanted = json.loads(json.dumps({name: value for name, value in identity.items() if name != "settings"}))
    for artefact in artefacts:
        for file in sorted(out.glob(f"{artefact}/*/*/seed-{identity['seed']}/{METRICS_FILE}")):
            metrics, run = _read(file), _read(file.with_name(RUN_FILE))
            if "after" in metrics or any(metrics.get(name) != value for name, value in wanted.items()):
                continue
            if where.items() <= run.items():
                return file.parent
    return None


def _read(file: Path) -> dict[str, Any]:
    """A record, or nothing where it is missing or damaged: then it is nobody's twin."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """As records are written."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
