"""Masks of the scores: a float bias without and with a gradient of its own, and boolean windows.

Each is divided by SDPA with the same mask. The band window, in which whole blocks are empty, stands beside our own call
without a mask.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.case import BAND_WINDOW, BIAS, RANDOM_WINDOW, TRAINED_BIAS
from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.entries import SHAPES, attention_entries, attention_entry

FORWARD = f"{BIAS}, forward"
VARIANTS = {
    BIAS: (BIAS, True),
    FORWARD: (BIAS, False),
    TRAINED_BIAS: (TRAINED_BIAS, True),
    RANDOM_WINDOW: (RANDOM_WINDOW, True),
    BAND_WINDOW: (BAND_WINDOW, True),
}
UNMASKED = "without a mask"
N_ITERS = 5  # of the rows that only stand beside ours
LABELS = ("128 × 197", "16 × 512")
SECONDS = 12.0


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label in LABELS[1:] if settings.quick else LABELS:
        for variant, (mask, backward) in VARIANTS.items():
            case = replace(SHAPES[label], mask=mask, backward=backward)
            entries = attention_entries(settings.pick(("sdpa", "native")), case, settings.n_iters)
            entries += [attention_entry(row, replace(case, n_iters=N_ITERS)) for row in settings.pick(("torch",))]
            if mask == BAND_WINDOW:
                plain = replace(case, mask="", n_iters=N_ITERS)
                entries += [attention_entry(row, plain, UNMASKED) for row in settings.pick(("native",))]
            yield from compete("bias", f"{label}, {variant}", entries, settings.plan(SECONDS), progress)
