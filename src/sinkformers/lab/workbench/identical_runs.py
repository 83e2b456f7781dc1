"""Identical runs: a training that another artefact has finished is copied instead of repeated.

The panels of Figure 2 show models that Table 1, Table 2 or Figure 6 train as well. Seed, configuration and data
determine a training to the last bit, so both have the same record under different names. `run.json` names the original
as `same_as`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinkformers.lab.artefacts import record_json
from sinkformers.lab.artefacts.artefact import JOB_FILE, JOB_LOG, LOG_FILE, METRICS_FILE, RUN_FILE, Run
from sinkformers.lab.workbench import checkpoint
from sinkformers.lab.workbench.locks import LOCK_FILE

OF_THE_RUN_ITSELF = (METRICS_FILE, RUN_FILE, LOG_FILE, LOCK_FILE, JOB_LOG, JOB_FILE)  # not copied


def copy_run(run: Run, folder: Path, identical: Path, out: Path) -> None:
    """Fill the folder of a run from that of an `identical` one; both are below `out`."""
    metrics = record_json.loads((identical / METRICS_FILE).read_bytes())
    own = {"artefact": run.artefact, "preset": run.preset, "arm": run.arm.name, "settings": dict(run.arm.settings)}
    origin = record_json.loads((identical / RUN_FILE).read_bytes())
    origin["same_as"] = identical.relative_to(out).as_posix()
    for file in sorted(identical.iterdir()):
        if file.is_file() and file.name not in OF_THE_RUN_ITSELF:
            checkpoint.replace(folder / file.name, file.read_bytes())
    checkpoint.replace(folder / RUN_FILE, json_bytes(origin))
    checkpoint.replace(folder / METRICS_FILE, json_bytes({**metrics, **own}))


def find_identical(
    out: Path, artefacts: Sequence[str], identity: Mapping[str, Any], where: Mapping[str, Any]
) -> Path | None:
    """Return the folder of a finished run of `artefacts` below `out` that is the same training; None if there is none.

    It must agree in `identity`, settings excepted, and in `where`, the environment that affects rounding.
    """
    wanted = record_json.as_read({name: value for name, value in identity.items() if name != "settings"})
    for artefact in artefacts:
        for file in sorted(out.glob(f"{artefact}/*/*/seed-{identity['seed']}/{METRICS_FILE}")):
            metrics, run = _read(file), _read(file.with_name(RUN_FILE))
            if "after" in metrics or any(metrics.get(name) != value for name, value in wanted.items()):
                continue
            if where.items() <= run.items():
                return file.parent
    return None


def _read(file: Path) -> dict[str, Any]:
    """Return a record; an empty one, which is identical to none, if it is missing or damaged."""
    try:
        return record_json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return a record as the bytes that are written."""
    return (record_json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
