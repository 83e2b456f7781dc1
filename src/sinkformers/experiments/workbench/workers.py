"""Several processes on one machine, each training cells on its share of the cores; claims keep them apart."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sinkformers.experiments.artefact import LOG, METRICS, Cell
from sinkformers.experiments.workbench.display import Display

LOOK = 0.5  # seconds between two looks at what the workers have done


def side_by_side(command: Sequence[str], jobs: int, cells: Sequence[Cell], out: Path, display: Display) -> int:
    """Run the command `jobs` times, show how far the cells are, and return the highest exit code.

    What several of them complain of alike is said once.
    """
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    workers = [_Worker(command, {**os.environ, "OMP_NUM_THREADS": threads}) for _ in range(jobs)]
    said: set[str] = set()
    done = {cell.folder for cell in cells if (out / cell.folder / METRICS).exists()}
    over = False
    try:
        with display:
            while not over:
                over = sum(worker.ended(said) for worker in workers) == jobs  # every one is asked
                for cell in cells:
                    if cell.folder not in done and (out / cell.folder / METRICS).exists():
                        done.add(cell.folder)
                        display.say(f"{cell.name}: done")
                display.cells(len(done), len(cells))
                running = {cell.name: _epoch(out / cell.folder) for cell in cells if cell.folder not in done}
                display.several({name: epoch for name, epoch in running.items() if epoch is not None})
                time.sleep(0 if over else LOOK)
    finally:
        for worker in workers:
            worker.end()
    return max(abs(worker.process.returncode) for worker in workers)


class _Worker:
    """A process, and what it complains of."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.complaints = tempfile.TemporaryFile()  # noqa: SIM115  (closed when it ends)
        self.process = subprocess.Popen(command, env=environment, stderr=self.complaints)

    def ended(self, said: set[str]) -> bool:
        """Whether it has; its complaints are passed on then, unless they are among those `said`."""
        if self.process.poll() is None:
            return False
        if not self.complaints.closed:
            self.complaints.seek(0)
            text = self.complaints.read().decode("utf-8", "replace")
            self.complaints.close()
            if text not in said:
                said.add(text)
                sys.stderr.write(text)
        return True

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


def _epoch(folder: Path) -> int | None:
    """The last epoch in a cell's log; None for one that nobody has begun."""
    try:
        return (folder / LOG).read_bytes().count(b"\n") - 1
    except OSError:
        return None
