"""Forward and backward, every row but the peers with threads of their own, every shape, n_iters 3, 5 and 21."""

from collections.abc import Iterator

import torch

from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.rows import EXTRAS, ROWS
from benchmarks.settings import Settings
from benchmarks.suites.entries import SECONDS, SHAPES, attention_entries

QUICK_SHAPES = ("64 × 128", "16 × 512")


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label, case in SHAPES.items():
        if settings.quick and label not in QUICK_SHAPES:
            continue
        torch.compiler.reset()  # the compiled rows specialise on a shape, and may do so a limited number of times
        rows = settings.pick(name for name in ROWS if name not in EXTRAS)
        entries = attention_entries(rows, case, settings.n_iters)
        yield from compete("attention", label, entries, settings.plan(SECONDS[case.n]), progress)
