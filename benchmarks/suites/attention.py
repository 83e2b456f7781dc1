"""Forward and backward, every row but the peers with threads of their own, every shape, n_iters 3, 5 and 21."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.rows import EXTRAS, ROWS
from benchmarks.settings import Settings
from benchmarks.suites.entries import SECONDS, SHAPES, attention_entry

N_ITERS = (3, 5, 21)
QUICK_SHAPES, QUICK_N_ITERS = ("64 × 128", "16 × 512"), (5,)


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label, case in SHAPES.items():
        if settings.quick and label not in QUICK_SHAPES:
            continue
        torch.compiler.reset()  # the compiled rows specialise on a shape, and may do so a limited number of times
        entries = []
        for row in settings.pick(name for name in ROWS if name not in EXTRAS):
            counts = QUICK_N_ITERS if settings.quick else N_ITERS
            counts = counts[:1] if row.formula == "softmax" else counts
            entries += [attention_entry(row, replace(case, n_iters=n_iters)) for n_iters in counts]
        yield from compete("attention", label, entries, settings.plan(SECONDS[case.n]), progress)
