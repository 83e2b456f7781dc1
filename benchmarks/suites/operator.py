"""`sinkhorn` alone: its time against n_iters, and very many tiny matrices beside row and column divisions.

The paper says that l iterations take l times longer: a slope of 1, in units of the time of one iteration.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.contest import compete
from benchmarks.measurement import FITTED, Measurement
from benchmarks.progress import Progress
from benchmarks.rows import ROWS
from benchmarks.settings import Settings
from benchmarks.suites.entries import attention_entry
from benchmarks.suites.operator_entries import Operator, Shape, backend, label, operator_entry, pick
from benchmarks.summary import line

SQUARE: Shape = (16, 512, 512)
TINY: Shape = (65536, 4, 4)
N_ITERS = (1, 3, 5, 9, 13, 21)
TINY_N_ITERS = 20


def log_loop(scores: Tensor, n_iters: int) -> Tensor:
    for step in range(n_iters):
        scores = scores - scores.logsumexp(-2 if step % 2 else -1, keepdim=True)
    return scores.exp()


def divisions(scores: Tensor, n_iters: int) -> Tensor:
    """What anyone would write for tiny matrices."""
    weights = scores.exp()
    for step in range(n_iters):
        weights = weights / weights.sum(-2 if step % 2 else -1, keepdim=True)
    return weights


_divisions_compiled = torch.compile(divisions, dynamic=False, fullgraph=True)
SQUARE_ROWS: dict[str, Operator] = {"native": backend("native"), "torch": backend("torch"), "log-loop": log_loop}
TINY_ROWS: dict[str, Operator] = {
    "divisions": _divisions_compiled,
    "native": backend("native"),
    "torch": backend("torch"),
}


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    counts = (1, 3, 9) if settings.quick else N_ITERS
    yardstick = attention_entry(ROWS["sdpa"], Case(2, 8, 512))
    rows = pick(SQUARE_ROWS, settings, keep=())
    entries = [yardstick, *(operator_entry(name, rows[name], SQUARE, count) for name in rows for count in counts)]
    results = compete("operator", label(SQUARE), entries, settings.plan(30.0), progress)
    yield from results
    for name in rows:
        yield from slope(name, results, progress)
    tiny = pick(TINY_ROWS, settings, keep=("divisions",))
    entries = [
        operator_entry(name, function, TINY, TINY_N_ITERS, compiled=name == "divisions")
        for name, function in tiny.items()
    ]
    yield from compete("operator", label(TINY), entries, settings.plan(15.0), progress, baseline="divisions")


def slope(row: str, results: list[Measurement], progress: Progress) -> Iterator[Measurement]:
    """What one more iteration costs, in units of the fitted cost of the first."""
    points = [(float(m.n_iters), m.seconds.median) for m in results if m.row == row and m.n_iters and m.seconds]
    if len(points) < 2:
        return
    intercept, per_step = line(*zip(*points, strict=True))
    fit = {"seconds per iteration": per_step, "slope": per_step / (intercept + per_step)}
    measurement = Measurement("operator", results[0].shape, row, FITTED, fit=fit)
    progress.show(measurement)
    yield measurement
