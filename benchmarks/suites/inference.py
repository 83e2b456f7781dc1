"""Forward without a gradient, n_iters 5."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.attention import QUICK_SHAPES
from benchmarks.suites.entries import SECONDS, SHAPES, attention_entry

QUICK_ROWS = ("sdpa", "softmax", "native", "torch")
ROWS = ("sdpa", "softmax", "native", "torch", "torch-compiled", "ten-lines", "log-loop-compiled", "pot-kernel")


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label, case in SHAPES.items():
        if settings.quick and label not in QUICK_SHAPES:
            continue
        torch.compiler.reset()
        case = replace(case, n_iters=5, backward=False)
        entries = [attention_entry(row, case) for row in settings.pick(QUICK_ROWS if settings.quick else ROWS)]
        yield from compete("inference", label, entries, settings.plan(0.2 * SECONDS[case.n]), progress)
