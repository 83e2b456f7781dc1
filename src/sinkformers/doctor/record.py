"""The findings as a record: JSON lines in the form of the benchmarks' records, which their report shows."""

import datetime
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sinkformers.core.environment import device_name, versions
from sinkformers.doctor.agreement import Finding
from sinkformers.doctor.benchmark import SDPA, Timed
from sinkformers.doctor.machine import machine


def write(file: Path, command: str, findings: Iterable[Finding], timed: Iterable[Timed]) -> None:
    """Write one line for each finding and each time. No names of hosts, users or folders are among them."""
    run = {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "quick": False,
        "rows": None,
        "versions": versions(),
        "commit": "",
        "dirty": False,
    }
    lines = [*map(_finding, findings), *map(_timed, timed)]
    machines = {device: machine(device) for device, _ in lines}
    text = "".join(
        json.dumps(run | {"machine": machines[device], "suite": f"doctor: {device_name(device)}"} | line) + "\n"
        for device, line in lines
    )
    file.write_text(text, encoding="utf-8")


def _finding(finding: Finding) -> tuple[torch.device, dict[str, Any]]:
    line: dict[str, Any] = {"shape": f"{finding.problem}, {_name(finding.dtype)}", "row": finding.backend}
    if finding.cannot:
        line |= {"status": "left out", "reason": finding.cannot}
    elif finding.raised:
        line |= {"status": "failed", "reason": finding.raised}
    else:
        worst = finding.worst
        line |= {"status": "measured"} | ({"deviation": worst} if math.isfinite(worst) else {})
        if finding.disagrees:
            line |= {"status": "refused", "reason": f"deviates by {worst:.1e}, more than {finding.allowed:.1e}"}
    return finding.device, line


def _timed(timed: Timed) -> tuple[torch.device, dict[str, Any]]:
    line: dict[str, Any] = {
        "shape": f"{timed.shape}, {_name(timed.dtype)}",
        "row": timed.row,
        "n": timed.shape.n,
        "n_iters": timed.n_iters,
    }
    if timed.reason:
        return timed.device, line | {"status": "left out", "reason": timed.reason}
    line |= {"status": "timed", "seconds": _spread(timed.seconds)}
    return timed.device, line | ({"baseline": SDPA, "ratio": _spread(timed.ratios)} if timed.ratios else {})


def _spread(values: tuple[float, ...]) -> dict[str, float]:
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "first": first, "third": third, "count": len(values)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
