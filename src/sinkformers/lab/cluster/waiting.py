"""Wait until the jobs of a request have ended, and show their progress."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from sinkformers.lab.artefacts.artefact import JOB_LOG, Run
from sinkformers.lab.cluster.queue import Queue
from sinkformers.lab.cluster.request import Request
from sinkformers.lab.workbench import progress
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.stopping import Stopped

POLL = 1.0  # seconds between two looks at the folders of the runs


def wait(queue: Queue, request: Request, display: Display) -> list[Run]:
    """Return the runs that are not finished when all jobs have ended.

    Raises:
        Stopped: on Ctrl-C. The jobs go on.
    """
    done = {run.folder for run in request.runs if progress.is_done(request.out, run)}
    try:
        with display:
            while True:
                states = queue.states()
                progress.show(display, request.runs, done, request.out)
                display.jobs(_counted(states[folder] for folder in states.keys() - done))
                if not states.keys() - done:
                    break
                time.sleep(POLL)
            time.sleep(POLL)  # the last record may become visible a little later than the end of its job
            progress.show(display, request.runs, done, request.out)
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT, queue.how_to_cancel()) from None
    return [run for run in request.runs if run.folder not in done]


def last_words(folder: Path) -> str:
    """Return the last line that the jobs of a run printed; empty if there is none."""
    try:
        lines = (folder / JOB_LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")


def _counted(states: Iterable[str]) -> str:
    counts = Counter(states)
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
