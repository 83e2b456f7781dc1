"""Several processes on one machine, each with its share of the cores; locks keep them off each other's runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from sinkformers.lab.artefacts.artefact import ExperimentError, Run
from sinkformers.lab.workbench import progress
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.stopping import Stopped, Stopping

POLL = 0.5  # seconds between two checks of the workers
SAVING = "Every process saves its run and stops; press again to stop at once."


def side_by_side(command: Sequence[str], jobs: int, runs: Sequence[Run], out: Path, display: Display) -> int:
    """Start the command `jobs` times, but not more often than there are unfinished runs; return the highest exit code.

    Progress of all runs is shown. Equal error messages of several workers are printed once.

    Raises:
        Stopped: if this process received a signal. All workers have saved their runs and ended by then.
    """
    done = {run.folder for run in runs if progress.is_done(out, run)}
    jobs = min(jobs, len(runs) - len(done))
    threads = str(max(1, (os.cpu_count() or 1) // max(1, jobs)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    with Stopping(notice=lambda: display.say(SAVING)) as stopping, stopping.deferred(), ExitStack() as started:
        workers = [started.enter_context(_Worker(command, environment)) for _ in range(jobs)]
        said: set[str] = set()
        with display:
            while sum(worker.ended(said) for worker in workers) < len(workers):  # polls all of them
                progress.show(display, runs, done, out)
                if stopping.number is not None:
                    for worker in workers:
                        worker.ask_to_end()
                time.sleep(POLL)
            progress.show(display, runs, done, out)
        if stopping.number is not None:
            finished = f"{len(done)} of {len(runs)} runs are finished"
            raise Stopped(stopping.number, f"{finished}, and the same command continues with the others.")
        return max((worker.code for worker in workers), default=0)


class _Worker:
    """A process and its error messages. At the end of the context, the process has ended.

    Its standard input is a pipe from this process. When the pipe is closed, which also happens when this process is
    killed, the worker saves its run and ends.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed at its end)
        try:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=self.errors)
        except OSError as error:
            self.errors.close()
            raise ExperimentError(
                f"cannot start a process ({error.strerror or error}). Run it with fewer --jobs."
            ) from error

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self.ask_to_end()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.errors.close()

    @property
    def code(self) -> int:
        """The exit code; that of a shell if the process was ended by a signal."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def ask_to_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def ended(self, said: set[str]) -> bool:
        """Return whether the process has ended. Its error messages are printed then, unless they are in `said`."""
        if self.process.poll() is None:
            return False
        if not self.errors.closed:
            self.errors.seek(0)
            text = self.errors.read().decode("utf-8", "replace")
            self.errors.close()
            if self.process.returncode < 0:
                text += (
                    f"sinkformers: a process was ended by signal {-self.process.returncode}. The same command "
                    "continues from its last checkpoint; where memory was short, run it with fewer --jobs.\n"
                )
            if text not in said:
                said.add(text)
                sys.stderr.write(text)
        return True
