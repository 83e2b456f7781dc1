"""The jobs of a request while they wait and run: in Slurm's queue, or in one that this process keeps."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sinkformers.lab.artefacts.artefact import Run
from sinkformers.lab.cluster import slurm
from sinkformers.lab.cluster.request import Request
from sinkformers.lab.workbench.locks import locked
from sinkformers.lab.workbench.progress import is_done, may_begin
from sinkformers.lab.workbench.stopping import blocked

if TYPE_CHECKING:
    from submitit import Job

PAUSE = 15.0  # seconds between two questions to Slurm


class Queue(Protocol):
    """Jobs that somebody waits for."""

    def states(self) -> dict[Path, str]:
        """Return the states of the jobs that have not ended, by the folders of their runs."""
        ...

    def how_to_cancel(self) -> str:
        """Return a sentence on the jobs that go on when nobody waits for them any longer."""
        ...


class SlurmQueue:
    """Jobs in the queue of Slurm, by the folders of their runs."""

    def __init__(self, ids: dict[Path, str]) -> None:
        self.ids = ids
        self._states: dict[Path, str] = dict.fromkeys(ids, "pending")
        self._asked = 0.0

    def states(self) -> dict[Path, str]:
        if time.monotonic() - self._asked > PAUSE:
            self._asked = time.monotonic()
            try:
                alive = slurm.queue(self.ids.values())
            except slurm.ExperimentError:
                return self._states  # the controller may be restarting
            self._states = {folder: str(alive[job]) for folder, job in self.ids.items() if job in alive}
        return self._states

    def how_to_cancel(self) -> str:
        arrays = " ".join(slurm.arrays(self.ids.values()))
        return f"The jobs go on: the same command with --wait shows them again, and scancel {arrays} cancels them."


class LocalQueue:
    """Jobs on this machine, each started by submitit's local executor as soon as another one has ended."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._running: dict[Path, tuple[int, Job[None]]] = {}  # and their places, which say which GPUs they use
        self._waiting = [run for run in request.runs if not is_done(request.out, run)]
        self.elsewhere = [run for run in self._waiting if not _is_free(request.out / run.folder)]
        self._waiting = [run for run in self._waiting if run not in self.elsewhere]

    def states(self) -> dict[Path, str]:
        self._running = {folder: (place, job) for folder, (place, job) in self._running.items() if not job.done()}
        for run in self._startable():
            place = min(set(range(self._at_once)) - {place for place, _ in self._running.values()})
            self._running[run.folder] = place, self._start(run, place)
            self._waiting.remove(run)
        # A run that continues one that failed cannot begin.
        self._waiting = [run for run in self._waiting if self._running or may_begin(self._request.out, run)]
        return {**{run.folder: "pending" for run in self._waiting}, **dict.fromkeys(self._running, "running")}

    def how_to_cancel(self) -> str:
        jobs = " ".join(job.job_id for _, job in self._running.values())
        waiting = f" {len(self._waiting)} have not begun; the same command starts them." if self._waiting else ""
        going = f"The jobs that run go on; kill {jobs} saves and ends them." if jobs else "No job runs."
        return f"{going}{waiting}"

    @property
    def _at_once(self) -> int:
        return self._request.at_once or 1

    def _startable(self) -> list[Run]:
        ready = [run for run in self._waiting if may_begin(self._request.out, run)]
        return ready[: self._at_once - len(self._running)]

    def _start(self, run: Run, place: int) -> Job[None]:
        import submitit

        wanted = self._request.resources
        executor = submitit.LocalExecutor(self._request.folder)
        first = place * wanted.gpus
        parameters: dict[str, Any] = {
            "timeout_min": wanted.minutes,
            "signal_delay_s": wanted.warning,
            "gpus_per_node": wanted.gpus,
            "visible_gpus": tuple(range(first, first + wanted.gpus)),
        }
        executor.update_parameters(**parameters)
        # Neither Ctrl-C nor a closed terminal ends the job.
        with blocked(signal.SIGINT, signal.SIGHUP):
            return executor.submit(self._request.job(run))


def _is_free(folder: Path) -> bool:
    with locked(folder) as held:
        return held
