"""What a call costs besides its arithmetic: one tiny attention call beside SDPA, `sinkhorn` beside `torch.softmax`."""

from collections.abc import Iterator

from torch import Tensor

from benchmarks.case import Case
from benchmarks.contest import Entry, compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.suites.entries import attention_entries
from benchmarks.suites.operator_entries import Operator, Shape, backend, label, operator_entry, pick

TINY = Case(1, 1, 16)
SHAPES: tuple[Shape, ...] = ((256, 32, 32), (64, 64, 64), (1, 20000, 64), (1, 4096, 4096))
SOFTMAX = "torch.softmax"
MOST = 1000  # rounds: a call of some microseconds needs many


def softmax(scores: Tensor, n_iters: int) -> Tensor:
    """Return SoftMax, which is `sinkhorn` with one iteration."""
    return scores.softmax(-1)


ROWS: dict[str, Operator] = {SOFTMAX: softmax, "native": backend("native")}


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    entries = attention_entries(settings.pick(("sdpa", "native")), TINY, settings.n_iters)
    yield from compete("small", TINY.label, entries, settings.plan(3.0, most=MOST), progress)
    for shape in SHAPES[:2] if settings.quick else SHAPES:
        entries = list(_entries(shape, settings))
        yield from compete("small", label(shape), entries, settings.plan(10.0, most=MOST), progress, baseline=SOFTMAX)


def _entries(shape: Shape, settings: Settings) -> Iterator[Entry]:
    for name, function in pick(ROWS, settings, keep=(SOFTMAX,)).items():
        if name == SOFTMAX:
            yield operator_entry(name, function, shape, 1, counted=False)
            continue
        for n_iters in settings.n_iters:
            yield operator_entry(name, function, shape, n_iters)
