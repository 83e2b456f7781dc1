"""What a solver of the limit is, how it is brought to a tolerance, and how its weights are checked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.exact_limit import column_error

MOST_PRODUCTS = 2000  # of any solver: at n = 1024 POT takes a minute or two for as many
SMALLEST = 1e-290  # weights below lose digits
SAMPLES = 10_000


@dataclass(frozen=True)
class Solution:
    """Weights (n, n) whose rows sum to 1, and the products with the kernel, or log-sum-exps of the matrix, they took.

    Products that a solver spends on looking for convergence do not count.
    """

    weights: Tensor
    products: int


@dataclass(frozen=True)
class Solver:
    """A way to the limit.

    `solve` takes scores (n, n) in float64 and a setting of the solver's own, or raises `Unavailable`. `settings` lists
    settings for a tolerance of the largest column error, from the one that takes least.
    """

    name: str
    title: str
    solve: Callable[[Tensor, float], Solution]
    settings: Callable[[float], Iterable[float]]


@dataclass(frozen=True)
class Attempt:
    """The first setting that reached the tolerance, or the last that was tried, with what came of it."""

    setting: float
    solution: Solution
    error: float
    seconds: float


def attempt(solver: Solver, scores: Tensor, tol: float) -> Attempt:
    """Try the settings of a solver until its column sums are within `tol`, or its products are used up."""
    settings, made = list(solver.settings(tol)), None
    solver.solve(scores[:8, :8], settings[0])  # loads libraries
    for setting in settings:
        start = time.perf_counter()
        solution = solver.solve(scores, setting)
        seconds = time.perf_counter() - start
        made = Attempt(setting, solution, column_error(solution.weights), seconds)
        if made.error <= tol or solution.products >= MOST_PRODUCTS:
            break
    assert made is not None
    return made


def quarters(tol: float) -> list[float]:
    """Return tolerances for solvers that look at a mean error, where ours is the largest of all columns."""
    return [tol / 4**power for power in range(1, 7)]


def scaling_error(scores: Tensor, weights: Tensor) -> float:
    """Return how far weights are from `exp(scores)` with rows and columns rescaled, relative to the largest score.

    Rescaling leaves the ratios `w_ij w_kl / (w_il w_kj)` as they are. Their logarithms are compared at random indices;
    infinite if the weights are too small everywhere.
    """
    generator = torch.Generator().manual_seed(0)
    i, j, k, l = torch.randint(len(scores), (4, SAMPLES), generator=generator)  # noqa: E741

    def ratio(x: Tensor) -> Tensor:
        return x[i, j] + x[k, l] - x[i, l] - x[k, j]

    smallest = torch.stack([weights[i, j], weights[k, l], weights[i, l], weights[k, j]]).amin(0)
    off = (ratio(weights.log()) - ratio(scores)).abs()[smallest > SMALLEST]
    worst = off.max().item() if len(off) else math.inf
    return worst / scores.abs().max().item()
