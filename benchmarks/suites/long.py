"""Eight heads at n = 8192, with a small and with a large workspace; forward and backward, and forward alone.

A contest has one limit only: a workspace that grows again between two calls would be part of the second one's time.
"""

import contextlib
from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.entries import attention_entries
from sinkformers import release_workspace, set_workspace_limit, workspace_limit

ROWS = ("sdpa", "native")
BATCH, HEADS, N = 1, 8, 8192
LIMITS = {"64 MiB": 64 * 2**20, "1 GiB": 2**30}
SECONDS = {True: 100.0, False: 30.0}  # forward and backward, forward alone: six to seven minutes with the checks


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for backward, seconds in SECONDS.items():
        case = Case(BATCH, HEADS, N, backward=backward)
        for name, limit in LIMITS.items():
            label = f"{case.label}, {name}{'' if backward else ', forward'}"
            entries = attention_entries(settings.pick(ROWS), case, settings.n_iters)
            with workspace(limit):
                found = compete("long", label, entries, settings.plan(seconds, least=3), progress)
            yield from found


@contextlib.contextmanager
def workspace(limit: int) -> Iterator[None]:
    """Limit the workspace of the native kernels to `limit` bytes; afterwards free it and set the previous limit."""
    before = workspace_limit()
    set_workspace_limit(limit)
    try:
        yield
    finally:
        set_workspace_limit(before)
        release_workspace()
