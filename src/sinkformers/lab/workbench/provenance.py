"""Provenance of a record: versions, commit, machine. It has its own file, so that equal runs have equal records."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from sinkformers import __version__


def provenance() -> dict[str, Any]:
    """Return versions, commit, machine, number of threads and time."""
    return {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "sinkformers": __version__},
        "commit": _commit(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system()},
        "threads": torch.get_num_threads(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """Return the commit of the source, marked if files were changed since; None for an installed package."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
