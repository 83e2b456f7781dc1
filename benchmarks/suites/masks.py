"""A padding mask against none: no padding at all, a quarter, a half. Queries and keys are both masked."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.entries import SHAPES, attention_entry

ROWS = ("sdpa", "native", "torch")
PADDINGS = {"": None, "0 % padding": 0.0, "25 % padding": 0.25, "50 % padding": 0.5}
LABELS = ("64 × 128", "128 × 197", "16 × 512", "8 × 1024")


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label in LABELS[::2] if settings.quick else LABELS:
        case = replace(SHAPES[label], n_iters=5)
        entries = [
            attention_entry(row, replace(case, padding=padding), variant)
            for variant, padding in PADDINGS.items()
            for row in settings.pick(ROWS)
        ]
        yield from compete("masks", label, entries, settings.plan(15.0), progress)
