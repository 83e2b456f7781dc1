"""One head at n = 4096 against two: the threads must share a head's rows as well as they share heads."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.entries import attention_entry

ROWS = ("sdpa", "native")
HEADS = {"": 2, "one head": 1}


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    entries = [
        attention_entry(row, Case(1, heads, 4096, n_iters=5), variant)
        for variant, heads in HEADS.items()
        for row in settings.pick(ROWS)
    ]
    yield from compete("one-head", "2 × 4096", entries, settings.plan(25.0), progress)
