"""Submission to Slurm: runs that can begin as job arrays, and runs that continue others as jobs that wait for them.

The id of its job is in the folder of every run, so that a second command does not submit a run that is in the queue.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock, Timeout

from sinkformers.lab.artefacts.artefact import JOB_FILE, ExperimentError, Run
from sinkformers.lab.cluster import slurm
from sinkformers.lab.cluster.request import Request
from sinkformers.lab.workbench.locks import LOCK_FILE
from sinkformers.lab.workbench.progress import is_done, may_begin, refuse_without_start

if TYPE_CHECKING:
    from submitit import Job, SlurmExecutor

LARGEST_ARRAY = 1000  # what Slurm allows unless it is configured otherwise
MOST_TIMEOUTS = 1000  # a run may need many time limits, and saves its progress at the end of each
ATTEMPT = re.compile(
    r"[0-9a-f]{32}\.pkl|\.submission_file_[0-9a-f]{32}\.sh"
)  # files of submitit until a job has its id
PATIENCE = 60.0  # seconds for another command to finish its submission


class Submission(NamedTuple):
    """The jobs of unfinished runs, by the folders of the runs."""

    new: dict[Path, str]  # ids
    queued: dict[Path, str]  # ids of jobs that were in the queue before


def submit(request: Request) -> Submission:
    """Submit the runs that are neither finished nor in the queue.

    Raises:
        ExperimentError: if Slurm refuses; or if a run continues one that is neither finished nor among the runs.
    """
    refuse_without_start(request.runs, request.out)
    with _alone(request.make_folder()):
        missing, queued = unqueued(request)
        new: dict[Path, str] = {}
        executor = _executor(request)
        begin = [run for run in missing if may_begin(request.out, run)]
        for part in (begin[first : first + LARGEST_ARRAY] for first in range(0, len(begin), LARGEST_ARRAY)):
            tasks = [request.job(run) for run in part]
            _record(request, part, _accepted(request, lambda tasks=tasks: executor.submit_array(tasks)), new)
        later = [run for run in missing if run not in begin]
        while later:
            ids = {**queued, **new}
            ready = [run for run in later if run.before in ids]
            for run in ready:
                executor.update_parameters(dependency=f"afterok:{ids[run.before]}")  # pyright: ignore
                _record(request, [run], _accepted(request, lambda run=run: [executor.submit(request.job(run))]), new)
            later = [run for run in later if run not in ready]
        return Submission(new, queued)


def unqueued(request: Request) -> tuple[list[Run], dict[Path, str]]:
    """Return the runs that are neither finished nor in the queue; and the ids of the jobs that are, by folders."""
    unfinished = [run for run in request.runs if not is_done(request.out, run)]
    ids = {run.folder: job for run in unfinished if (job := recorded_id(request.out / run.folder)) is not None}
    alive = slurm.queue(ids.values())
    queued = {folder: job for folder, job in ids.items() if job in alive}
    return [run for run in unfinished if run.folder not in queued], queued


def recorded_id(folder: Path) -> str | None:
    """Return the id of the last job of a run; None if it has none."""
    try:
        return str(json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))["slurm"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record(request: Request, runs: Sequence[Run], jobs: Sequence[Job[None]], ids: dict[Path, str]) -> None:
    for run, job in zip(runs, jobs, strict=True):
        ids[run.folder] = job.job_id
        (request.out / run.folder).mkdir(parents=True, exist_ok=True)
        (request.out / run.folder / JOB_FILE).write_text(json.dumps({"slurm": job.job_id}), encoding="utf-8")


def _executor(request: Request) -> SlurmExecutor:
    import submitit

    wanted = request.resources
    executor = submitit.SlurmExecutor(request.folder, max_num_timeout=MOST_TIMEOUTS)
    cpus = wanted.cpus * wanted.processes
    parameters: dict[str, Any] = {
        "job_name": f"sinkformers-{request.artefact}",
        "time": wanted.minutes,
        "signal_delay_s": wanted.warning,
        "partition": wanted.partition,
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": cpus,
        "srun_args": [f"--cpus-per-task={cpus}"],  # srun does not take it from sbatch
        "gpus_per_node": wanted.gpus or None,
        "array_parallelism": request.at_once or LARGEST_ARRAY,
        "wckey": None,
        # A job whose predecessor failed would wait for ever.
        "additional_parameters": {"requeue": True, "kill-on-invalid-dep": "yes"},
    }
    executor.update_parameters(**parameters)
    return executor


def _accepted(request: Request, submit: Callable[[], Sequence[Job[None]]]) -> Sequence[Job[None]]:
    """Submit; what Slurm says when it refuses becomes an `ExperimentError`, and no file of the attempt is left."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    before = set(request.folder.iterdir())
    try:
        with redirect_stderr(io.StringIO()):  # submitit prints what it raises
            return submit()
    except (FailedJobError, FailedSubmissionError) as error:
        for file in set(request.folder.iterdir()) - before:
            if ATTEMPT.fullmatch(file.name):
                file.unlink(missing_ok=True)
        raise ExperimentError(
            f"Slurm refuses the jobs: {slurm.said(str(error))}. sinfo shows the partitions and their limits."
        ) from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one command at a time submit runs of a preset."""
    try:
        with FileLock(folder / LOCK_FILE, timeout=PATIENCE):
            yield
    except Timeout:
        raise ExperimentError(
            f"another command has been submitting runs to {folder} for {PATIENCE:.0f} s. Try again when it has ended."
        ) from None
