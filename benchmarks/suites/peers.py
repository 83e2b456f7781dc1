"""Libraries with compilers and threads of their own, apart from the rest: what they leave running disturbs others."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.rows import EXTRAS
from benchmarks.settings import Settings
from benchmarks.suites.entries import SECONDS, SHAPES, attention_entry

N_ITERS = 5


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label in ("64 × 128", "16 × 512", "8 × 1024"):
        case = replace(SHAPES[label], n_iters=N_ITERS)
        entries = [attention_entry(row, case) for row in settings.pick(("sdpa", "native", *EXTRAS))]
        yield from compete("peers", label, entries, settings.plan(SECONDS[case.n]), progress)
