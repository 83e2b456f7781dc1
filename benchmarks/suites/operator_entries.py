"""`sinkhorn` and what stands beside it, as entries of a contest."""

from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from benchmarks import agreement
from benchmarks.contest import Entry
from benchmarks.settings import Settings
from benchmarks.steps import Step, TorchStep
from sinkformers import sinkhorn

Operator = Callable[[Tensor, int], Tensor]
Shape = tuple[int, int, int]
LARGEST_DIRECT = 2**22  # entries: the graph of the reference in float64 has several matrices per iteration


def backend(name: str) -> Operator:
    return lambda scores, n_iters: sinkhorn(scores, n_iters=n_iters, backend=name)


def pick(rows: dict[str, Operator], settings: Settings, keep: tuple[str, ...]) -> dict[str, Operator]:
    """Return the rows that were asked for, and those of `keep` always."""
    asked = set(rows) if settings.rows is None else {*settings.rows, *keep}
    return {name: function for name, function in rows.items() if name in asked}


def label(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))})"


def operator_entry(
    name: str, function: Operator, shape: Shape, n_iters: int, *, counted: bool = True, compiled: bool = False
) -> Entry:
    """Return a function of scores and n_iters as it is timed; a row that is not `counted` shows no n_iters."""

    def step(scores: Tensor, grad: Tensor) -> Step:
        return TorchStep(lambda x: function(x, n_iters), [scores], grad)

    def check() -> agreement.Checked:
        scores, grad, _ = with_known_answer(shape)
        return agreement.check(step(scores, grad), lambda: expected(shape, n_iters))

    settings = {"n": shape[1]} | ({"n_iters": n_iters} if counted else {})
    return Entry(name, lambda: step(*draw(shape)), check, settings, compiled=compiled)


@cache
def draw(shape: Shape) -> tuple[Tensor, Tensor]:
    """Draw scores and an incoming gradient."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def copies(shape: Shape) -> int:
    """Return how often rows and columns of a matrix small enough for the reference are repeated."""
    batch, n, m = shape
    return next(c for c in range(1, n + 1) if n % c == m % c == 0 and batch * n * m <= LARGEST_DIRECT * c * c)


def with_known_answer(shape: Shape) -> tuple[Tensor, Tensor, int]:
    """Return scores and gradient whose answer a small problem knows, and the number c of copies.

    With every row and column repeated c times, weights and gradients are those of the small problem divided by c.
    """
    batch, n, m = shape
    c = copies(shape)
    scores, grad = (x.repeat(1, c, c) for x in draw((batch, n // c, m // c)))
    return scores, grad, c


@lru_cache(maxsize=8)
def expected(shape: Shape, n_iters: int) -> list[Tensor]:
    """Return weights and gradient of the reference in float64."""
    batch, n, m = shape
    c = copies(shape)
    scores, grad = draw((batch, n // c, m // c))
    step = TorchStep(lambda x: backend("reference")(x, n_iters), [scores.double()], grad.double())
    step.call()
    return [x.repeat(1, c, c) / c for x in step.outcome()]
