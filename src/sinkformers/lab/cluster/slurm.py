"""Slurm's own commands: is it here, which jobs does it know, and what does it say when it refuses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.cluster.resources import minutes

ANSWERS_WITHIN = 60.0  # seconds
ENDING = ("COMPLETING", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Queued(NamedTuple):
    """A job in Slurm's queue."""

    state: str  # PENDING, RUNNING, …
    reason: str  # why it waits; None if it does not

    def __str__(self) -> str:
        reason = "" if self.reason in ("", "None") else f" ({self.reason})"
        return f"{self.state.lower()}{reason}"


def require() -> None:
    """Refuse a machine without Slurm's commands."""
    missing = [name for name in ("sbatch", "squeue", "srun") if shutil.which(name) is None]
    if missing:
        raise ExperimentError(
            f"--cluster slurm: there is no {missing[0]} on PATH. Run the command on a machine of a Slurm cluster, such "
            "as its login node; --cluster local trains on this machine."
        )


def queue(jobs: Iterable[str]) -> dict[str, Queued]:
    """Return those of the jobs that are waiting, running or ending, by their ids; `12_3` is task 3 of array 12.

    Raises:
        ExperimentError: if Slurm does not answer.
    """
    wanted = set(jobs)
    whole = arrays(wanted)
    if not whole:
        return {}
    answer = _asked(["squeue", "--noheader", "--array", "--format=%i|%T|%r", f"--jobs={','.join(whole)}"])
    if answer.returncode:
        if "Invalid job id" in answer.stderr:  # the only job asked for has ended long ago
            return {}
        raise ExperimentError(f"squeue does not answer: {said(answer.stderr)}. Try again.")
    lines = (line.split("|", 2) for line in answer.stdout.splitlines())
    return {line[0]: Queued(*line[1:]) for line in lines if line[0] in wanted}


def time_limit(partition: str | None) -> int | None:
    """Return the longest time, in minutes, that a partition allows, by default the cluster's own; None if unknown."""
    try:
        answer = _asked(["sinfo", "--noheader", "--format=%P|%l"])
    except ExperimentError:
        return None
    limits = dict(line.split("|", 1) for line in answer.stdout.splitlines() if "|" in line)
    default = next((name for name in limits if name.endswith("*")), "")
    text = limits.get(default if partition in (None, default.rstrip("*")) else partition or "", "infinite").strip()
    return None if text in ("infinite", "n/a") else minutes(text)


def arrays(jobs: Iterable[str]) -> list[str]:
    """Return the ids of the arrays that the jobs belong to; a job that belongs to none stands for itself."""
    return sorted({job.partition("_")[0] for job in jobs}, key=int)


def is_ending(job: str) -> bool | None:
    """Return whether Slurm is ending the job already, as after scancel; None if it does not answer."""
    try:
        found = queue([job])
    except ExperimentError:
        return None
    return job not in found or found[job].state in ENDING


def _asked(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWERS_WITHIN, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExperimentError(f"{command[0]} does not answer ({error}). Try again.") from None


def said(complaint: str) -> str:
    """Return what a command of Slurm wrote on stderr as one sentence, without its own name and without a full stop."""
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in complaint.splitlines()]
    return "; ".join(dict.fromkeys(filter(None, lines))).rstrip(".") or "it gives no reason"
