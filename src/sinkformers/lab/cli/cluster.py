"""`sinkformers run --cluster`: every run as a job of its own, on a cluster or on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sinkformers.lab.artefacts.artefact import JOB_LOG
from sinkformers.lab.cli.refusal import need, refuse

if TYPE_CHECKING:
    from sinkformers.lab.artefacts.artefact import Artefact, Run
    from sinkformers.lab.cluster.queue import LocalQueue, Queue, SlurmQueue
    from sinkformers.lab.cluster.request import Request
    from sinkformers.lab.cluster.resources import Resources

TIME = "4:00:00"  # a run that needs longer continues in its next slot


@dataclass(frozen=True)
class ClusterOptions:
    """The options of `sinkformers run` that describe jobs, as they were given."""

    cluster: str | None
    partition: str | None
    gpus: int | None
    cpus: int | None
    processes: int | None
    time: str | None
    wait: bool

    def check(self, device: str) -> None:
        """Refuse options that contradict each other, before anything is imported or looked up."""
        jobs = ("partition", "gpus", "cpus", "processes", "time", "wait")
        given = [f"--{name}" for name in jobs if getattr(self, name) not in (None, False)]
        if self.cluster is None:
            if given:
                refuse(f"{given[0]} describes jobs; add --cluster slurm or --cluster local.")
            return
        if self.cluster == "local" and self.partition is not None:
            refuse("--partition is for --cluster slurm; --cluster local has no partitions. Leave it out.")
        if "RANK" in os.environ:
            refuse("--cluster cannot be used with torchrun, which each job starts itself; use --processes or --gpus.")
        if self.gpus and self.processes not in (None, self.gpus):
            refuse(f"--gpus {self.gpus} trains a run with one process per GPU; leave --processes {self.processes} out.")
        if device == "cuda" and not self.gpus:
            refuse("--device cuda: the jobs have no GPU. Add --gpus 1.")

    def resources(self) -> Resources:
        """Return what each job asks for; a time limit that the partition does not allow is refused."""
        from sinkformers.lab.cluster import slurm
        from sinkformers.lab.cluster.resources import LONGEST, Resources, duration, minutes

        limit = LONGEST if self.time is None and self.cluster == "local" else minutes(self.time or TIME)
        most = slurm.time_limit(self.partition) if self.cluster == "slurm" else None
        if most is not None and limit > most and self.time is not None:
            refuse(
                f"--time {self.time} is {duration(limit)}, and the partition allows {duration(most)}. Ask for less: "
                "a run that needs longer is queued again, and continues."
            )
        gpus = self.gpus or 0
        processes = self.processes or max(1, gpus)
        return Resources(min(limit, most or limit), gpus, self.cpus or 1, processes, self.partition)

    def request(
        self,
        runs: Sequence[Run],
        out: Path,
        jobs: int | None,
        *,
        n_iters: str | None,
        data: Path | None,
        **options: Any,
    ) -> Request:
        """Return the jobs of `runs`; the other options are those of `sinkformers run`."""
        from sinkformers.lab.cluster.request import Request

        values = {**options, "n_iters": n_iters, "data": None if data is None else data.absolute()}
        shared = {f"--{name.replace('_', '-')}": str(value) for name, value in values.items() if value is not None}
        flat = tuple(part for option in shared.items() for part in option)
        return Request(tuple(runs), out.absolute(), flat, self.resources(), jobs)


def train_in_jobs(options: ClusterOptions, request: Request, artefact: Artefact) -> None:
    """Submit the runs that are not finished, and wait for them if that was asked for.

    Ends the command unless all runs are finished.
    """
    need("jobs of a cluster", ("submitit",), "cluster")
    if options.cluster == "slurm":
        queue = _submit(request)
        if not options.wait and queue.ids:
            raise typer.Exit
    else:
        queue = _begin(request)
        request = request._replace(runs=tuple(run for run in request.runs if run not in queue.elsewhere))
        if not request.runs:
            raise typer.Exit
    _wait(queue, request, artefact)


def _submit(request: Request) -> SlurmQueue:
    """Submit runs to Slurm, and say where they can be watched."""
    from sinkformers.lab.cluster import slurm, submission
    from sinkformers.lab.cluster.queue import SlurmQueue

    slurm.require()
    new, queued = submission.submit(request)
    names = {run.folder: run.name for run in request.runs}
    for folder, job in queued.items():
        print(f"{names[folder]}: in the queue as job {job}")
    if new:
        jobs = " ".join(slurm.arrays(new.values()))
        shown = request.folder.parent
        print(f"{_runs(len(new))} submitted as job {jobs}, each: {request.resources}.")
        print(f"  their states:  squeue --jobs={jobs.replace(' ', ',')}, or this command with --wait or --dry-run")
        print(f"  their logs:    {shown}/ARM/seed-K/{JOB_LOG}")
        print(f"  their results: sinkformers report {shlex.quote(str(shown))}")
        print(f"  to cancel:     scancel {jobs}")
    return SlurmQueue({**queued, **new})


def _begin(request: Request) -> LocalQueue:
    from sinkformers.lab.cluster.queue import LocalQueue
    from sinkformers.lab.workbench.progress import refuse_without_start

    refuse_without_start(request.runs, request.out)
    request.make_folder()
    queue = LocalQueue(request)
    for run in queue.elsewhere:
        print(f"{run.name}: another process is training it.")
    return queue


def _wait(queue: Queue, request: Request, artefact: Artefact) -> None:
    from sinkformers.lab.cluster.waiting import last_words, wait
    from sinkformers.lab.workbench import progress
    from sinkformers.lab.workbench.display import Display

    display = Display()
    display.expect(progress.expected_epochs(artefact, request.runs))
    unfinished = wait(queue, request, display)
    for run in unfinished:
        folder = request.out / run.folder
        print(f"{run.name}: {last_words(folder) or 'it has not begun'} (log: {folder / JOB_LOG})", file=sys.stderr)
    if unfinished:
        refuse(
            f"{len(unfinished)} of {len(request.runs)} runs are not finished, and their jobs have ended. The same "
            "command submits them again, and they continue.",
            code=1,
        )


def preview(options: ClusterOptions, request: Request) -> None:
    """Print what the command would do with each run. Starts, submits and writes nothing."""
    from sinkformers.lab.cluster import submission
    from sinkformers.lab.workbench import progress

    progress.refuse_without_start(request.runs, request.out)
    missing = [run for run in request.runs if not progress.is_done(request.out, run)]
    queued: dict[Path, str] = {}
    if options.cluster == "slurm":
        missing, queued = submission.unqueued(request)
    for run in request.runs:
        if run.folder in queued:
            state = f"in the queue as job {queued[run.folder]}"
        elif run not in missing:
            state = "finished"
        else:
            after = "" if progress.may_begin(request.out, run) else f", after {run.arm.after}"
            epochs = progress.epochs_done(request.out, run) or 0
            logged = f" ({epochs} {'epoch is' if epochs == 1 else 'epochs are'} logged)" if epochs > 0 else ""
            state = f"to be trained{after}{logged}"
        print(f"{run.name}: {state}")
    if options.cluster is None:
        print(f"{_runs(len(missing))} would be trained.")
    else:
        print(f"{_runs(len(missing))} would be submitted, each as a job: {request.resources}.")
        if missing:
            print(f"The command of the first job: {shlex.join(request.command(missing[0]))}")


def _runs(count: int) -> str:
    return f"{count or 'no'} {'run' if count == 1 else 'runs'}"
