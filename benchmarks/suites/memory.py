"""Peak memory of a training step: 16 × 2048 at n_iters 21 beside SDPA, and one head at n = 32768."""

from collections.abc import Iterator

from benchmarks import peak
from benchmarks.case import Case
from benchmarks.measurement import LEFT_OUT, MEASURED, Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.steps import Unavailable

CASES = {
    Case(2, 8, 2048, n_iters=21): ("sdpa", "native", "torch", "softmax", "ten-lines", "log-loop", "pot-log"),
    Case(1, 1, 32768, n_iters=5): ("native", "torch"),
}
QUICK_CASES = {Case(2, 8, 512, n_iters=21): ("sdpa", "native", "torch")}


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for case, names in (QUICK_CASES if settings.quick else CASES).items():
        for row in settings.pick(names):
            progress.say(f"memory {case.label}: {row.name}")
            measurement = peak_of("memory", row.name, case, settings.threads)
            progress.show(measurement)
            yield measurement


def peak_of(suite: str, row: str, case: Case, threads: int) -> Measurement:
    n_iters = None if row in ("sdpa", "softmax") else case.n_iters
    try:
        count = peak.measure(row, case, threads)
    except Unavailable as refusal:
        return Measurement(suite, case.label, row, LEFT_OUT, n_iters, reason=str(refusal), n=case.n)
    return Measurement(suite, case.label, row, MEASURED, n_iters, n=case.n, peak_bytes=count)
