"""Half precision beside SDPA in the same dtype, forward and backward."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.entries import attention_entries

ROWS = ("sdpa", "native")
CASES = {
    "256 × 64, bfloat16": Case(32, 8, 64, dtype="bfloat16"),
    "64 × 128, bfloat16": Case(8, 8, 128, dtype="bfloat16"),
    "128 × 197, bfloat16": Case(16, 8, 197, dtype="bfloat16"),
    "16 × 512, bfloat16": Case(2, 8, 512, dtype="bfloat16"),
    "8 × 1024, bfloat16": Case(1, 8, 1024, dtype="bfloat16"),
    "2 × 4096, bfloat16": Case(1, 2, 4096, dtype="bfloat16"),
    "8 × 1024, float16": Case(1, 8, 1024, dtype="float16"),
}
SECONDS, MOST = 30.0, 20  # rounds: without fast products in this precision SDPA takes long


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label in list(CASES)[:1] if settings.quick else CASES:
        entries = attention_entries(settings.pick(ROWS), CASES[label], settings.n_iters)
        yield from compete("half", label, entries, settings.plan(SECONDS, most=MOST), progress)
