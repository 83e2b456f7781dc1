"""`sinkhorn` alone: its time against n_iters, and very many tiny matrices beside row and column divisions.

The paper says that l iterations take l times longer: a slope of 1, in units of the time of one iteration.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from benchmarks import agreement
from benchmarks.case import Case
from benchmarks.contest import Entry, compete
from benchmarks.measurement import FITTED, Measurement
from benchmarks.progress import Progress
from benchmarks.rows import ROWS
from benchmarks.settings import Settings
from benchmarks.steps import Step, TorchStep
from benchmarks.suites.entries import attention_entry
from benchmarks.summary import line
from sinkformers import sinkhorn

Operator = Callable[[Tensor, int], Tensor]
SQUARE, TINY = (16, 512, 512), (65536, 4, 4)
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


def backend(name: str) -> Operator:
    return lambda scores, n_iters: sinkhorn(scores, n_iters=n_iters, backend=name)


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
    rows = _asked(SQUARE_ROWS, settings, keep=())
    entries = [yardstick, *(_entry(name, rows[name], SQUARE, count) for name in rows for count in counts)]
    results = compete("operator", _label(SQUARE), entries, settings.plan(30.0), progress)
    yield from results
    for name in rows:
        yield from slope(name, results, progress)
    tiny = _asked(TINY_ROWS, settings, keep=("divisions",))
    entries = [_entry(name, function, TINY, TINY_N_ITERS) for name, function in tiny.items()]
    yield from compete("operator", _label(TINY), entries, settings.plan(15.0), progress, baseline="divisions")


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


def _asked(rows: dict[str, Operator], settings: Settings, keep: tuple[str, ...]) -> dict[str, Operator]:
    asked = set(rows) if settings.rows is None else {*settings.rows, *keep}
    return {name: function for name, function in rows.items() if name in asked}


def _label(shape: tuple[int, int, int]) -> str:
    return f"({', '.join(map(str, shape))})"


@cache
def _inputs(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@cache
def _expected(shape: tuple[int, int, int], n_iters: int) -> list[Tensor]:
    scores, grad = _inputs(shape)
    step = TorchStep(lambda x: backend("reference")(x, n_iters), [scores.double()], grad.double())
    step.call()
    return step.outcome()


def _entry(name: str, function: Operator, shape: tuple[int, int, int], n_iters: int) -> Entry:
    def build() -> Step:
        scores, grad = _inputs(shape)
        return TorchStep(lambda x: function(x, n_iters), [scores], grad)

    return Entry(
        name,
        build,
        lambda: agreement.check(build(), lambda: _expected(shape, n_iters)),
        {"n": shape[1], "n_iters": n_iters},
        compiled=name == "divisions",
    )
