"""Several processes on one machine, each training runs on its share of the cores; claims keep them apart."""

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

from sinkformers.lab.artefacts.artefact import LOG_FILE, METRICS_FILE, ExperimentError, Run
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.stopping import Stopped, Stopping

LOOK = 0.5  # seconds between two looks at what the workers have done
SAVING = "Every process saves what it is at, and ends; once more ends them at once."


def side_by_side(command: Sequence[str], jobs: int, runs: Sequence[Run], out: Path, display: Display) -> int:
    """Run the command `jobs` times, or once for each run that is not finished where those are fewer; show how far
    the runs are, and return the highest exit code.

    What several of them complain of alike is said once. Raises `Stopped` where this process was asked to end, and
    then no worker is left: each has saved what it was at.
    """
    done = {run.folder for run in runs if (out / run.folder / METRICS_FILE).exists()}
    jobs = min(jobs, len(runs) - len(done))
    threads = str(max(1, (os.cpu_count() or 1) // max(1, jobs)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    with Stopping(notice=lambda: display.say(SAVING)) as stopping, stopping.deferred(), ExitStack() as started:
        workers = [started.enter_context(_Worker(command, environment)) for _ in range(jobs)]
        said: set[str] = set()
        with display:
            while sum(worker.ended(said) for worker in workers) < len(workers):  # every one is asked
                _show(display, runs, done, out)
                if stopping.number is not None:
                    for worker in workers:
                        worker.ask_to_end()
                time.sleep(LOOK)
            _show(display, runs, done, out)
        if stopping.number is not None:
            finished = f"{len(done)} of {len(runs)} runs are finished"
            raise Stopped(stopping.number, f"{finished}, and the same command goes on with the others.")
        return max((worker.code for worker in workers), default=0)


def _show(display: Display, runs: Sequence[Run], done: set[Path], out: Path) -> None:
    """How far the runs are; `done` takes up those that are finished."""
    for run in runs:
        if run.folder not in done and (out / run.folder / METRICS_FILE).exists():
            done.add(run.folder)
            display.say(f"{run.name}: done")
    display.runs(len(done), len(runs))
    running = {run.name: _epoch(out / run.folder) for run in runs if run.folder not in done}
    display.several({name: epoch for name, epoch in running.items() if epoch is not None})


class _Worker:
    """A process, and what it complains of. As a context it has ended when the context has.

    The process holds one side of a pipe as its standard input, and this one the other. When that is closed, as it is
    when this process ends, however it ends, the worker saves what it is at and ends too.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.complaints = tempfile.TemporaryFile()  # noqa: SIM115  (closed when it ends)
        try:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=self.complaints)
        except OSError as error:
            self.complaints.close()
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
        self.complaints.close()

    @property
    def code(self) -> int:
        """Its exit code; that of a shell where a signal ended it."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def ask_to_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def ended(self, said: set[str]) -> bool:
        """Whether it has; its complaints are passed on then, unless they are among those `said`."""
        if self.process.poll() is None:
            return False
        if not self.complaints.closed:
            self.complaints.seek(0)
            text = self.complaints.read().decode("utf-8", "replace")
            self.complaints.close()
            if self.process.returncode < 0:
                text += (
                    f"sinkformers: a process was ended by signal {-self.process.returncode}. The same command goes on "
                    "from its last checkpoint; where memory was short, run it with fewer --jobs.\n"
                )
            if text not in said:
                said.add(text)
                sys.stderr.write(text)
        return True


def _epoch(folder: Path) -> int | None:
    """The last epoch in a run's log; None for one that nobody has begun."""
    try:
        return (folder / LOG_FILE).read_bytes().count(b"\n") - 1
    except OSError:
        return None
