"""The job of one run: what happens on the machine where the cluster starts it.

The job starts the command that trains the run, and passes on what the cluster tells it. The command is a process of its
own, which knows nothing of clusters: it stops as `--jobs` stops its workers.

- **Preempted, or almost out of time**: Slurm sends SIGTERM, or the signal that submitit asked it for. The run saves a
  checkpoint, and submitit puts the job back into the queue. When it starts again, the run continues.
- **Cancelled**: Slurm sends SIGTERM too, but has taken the job off the queue. The run saves and the job ends.
- **Killed**: when the job starts again, the run continues from its last checkpoint.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from sinkformers.lab.artefacts.artefact import JOB_FILE, JOB_LOG, METRICS_FILE
from sinkformers.lab.cluster import slurm
from sinkformers.lab.workbench.stopping import WITH_LOG, WORKER, blocked

if TYPE_CHECKING:
    from submitit import JobEnvironment

POLL = 0.2  # seconds between two looks at the process


@dataclass(frozen=True)
class TrainingJob:
    """A function that submitit calls in a job: it trains one run, or goes on with it.

    Args:
        command: trains the run. It ends when its standard input ends, and saves first.
        folder: of the run.
        threads: of each process. The same in every job, because rounding depends on it.
    """

    command: tuple[str, ...]
    folder: Path
    threads: int

    def __call__(self) -> None:
        from submitit import JobEnvironment

        environment = JobEnvironment()
        preemption = getattr(signal, f"SIG{environment.USR_SIG}")
        requeue: Any = signal.getsignal(preemption)  # submitit's handler: calls `checkpoint`, queues again and exits
        asked: list[int] = []

        def ask(number: int, frame: FrameType | None) -> None:
            asked.append(number)

        signal.signal(preemption, ask)
        signal.signal(signal.SIGTERM, ask)
        code = self._train(environment.job_id, preemption, asked)
        # Left where a job was killed while submitit wrote; submitit then refuses to write again.
        for file in (environment.paths.submitted_pickle, environment.paths.result_pickle):
            file.with_name(f"{file.name}.save_tmp").unlink(missing_ok=True)
        if (self.folder / METRICS_FILE).exists():
            (self.folder / JOB_FILE).unlink(missing_ok=True)
            return
        if not asked:
            sys.exit(code or 1)  # it failed; or another process trains this run
        if not _goes_on(environment, preemption, asked):
            sys.exit(128 + signal.SIGTERM)
        requeue(preemption, None)

    def checkpoint(self) -> Any:
        """Return what submitit runs when the job starts again: the same, since the state is in the run's folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _train(self, job: str, preemption: int, asked: Sequence[int]) -> int:
        """Run the command until it ends, which it is told to do once a signal was `asked`; return its exit code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / JOB_LOG).open("ab", buffering=0) as log:
            log.write(_line(f"job {job} runs {shlex.join(self.command)}"))
            environment = {**os.environ, WORKER: WITH_LOG, "OMP_NUM_THREADS": str(self.threads)}
            # Slurm signals every process of a job. That signal would end this one, which has no handler for it.
            with blocked(preemption):
                process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
            assert process.stdin is not None
            with process.stdin:
                while process.poll() is None and not asked:
                    time.sleep(POLL)
                if asked:
                    log.write(_line(f"job {job} stops its run after {signal.Signals(asked[0]).name}"))
            code = process.wait()
            if code == -signal.SIGKILL:
                log.write(_line(f"job {job}: the process was killed. Where memory is short, ask the cluster for more."))
        return code if code >= 0 else 128 - code


def _goes_on(environment: JobEnvironment, preemption: int, asked: Sequence[int]) -> bool:
    """Return whether the job is to be queued again, now that its run has stopped because of a signal."""
    if environment.cluster != "slurm":
        return preemption in asked
    ending = slurm.is_ending(environment.job_id)
    while ending is None and preemption not in asked:  # unknown: Slurm itself ends a job that is over
        time.sleep(POLL)
    return not ending


def _line(text: str) -> bytes:
    return f"{datetime.now().astimezone().isoformat(timespec='seconds')} {text}\n".encode()
