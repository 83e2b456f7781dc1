"""Several processes on one machine, each training cells on its share of the cores; claims keep them apart."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from sinkformers.experiments.artefact import LOG, METRICS, Cell
from sinkformers.experiments.workbench.display import Display

LOOK = 0.5  # seconds between two looks at what the workers have done


def side_by_side(command: Sequence[str], jobs: int, cells: Sequence[Cell], out: Path, display: Display) -> int:
    """Run the command `jobs` times, show how far the cells are, and return the highest exit code."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    workers = [subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": threads}) for _ in range(jobs)]
    done = {cell.folder for cell in cells if (out / cell.folder / METRICS).exists()}
    over = False
    try:
        with display:
            while not over:
                over = all(worker.poll() is not None for worker in workers)
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
            if worker.poll() is None:
                worker.terminate()
            worker.wait()
    return max(abs(worker.returncode) for worker in workers)


def _epoch(folder: Path) -> int | None:
    """The last epoch in a cell's log; None for one that nobody has begun."""
    try:
        return (folder / LOG).read_bytes().count(b"\n") - 1
    except OSError:
        return None
