"""Scores of standard deviation 30 against 1: denormal numbers must not slow anything down."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.entries import SHAPES, attention_entry

ROWS = ("sdpa", "softmax", "native", "torch")
STDS = {"": 1.0, "std 30": 30.0}
LABELS = ("64 × 128", "16 × 512", "8 × 1024")


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label in LABELS[:2] if settings.quick else LABELS:
        case = replace(SHAPES[label], n_iters=5)
        entries = [
            attention_entry(row, replace(case, std=std), variant)
            for variant, std in STDS.items()
            for row in settings.pick(ROWS)
        ]
        yield from compete("sharp", label, entries, settings.plan(12.0), progress)
