"""Solvers of the limit as entries of a contest, and the column error that a number of products leaves."""

import functools
import math
from collections.abc import Iterator

from torch import Tensor

from benchmarks.agreement import Checked
from benchmarks.case import Case, draw
from benchmarks.contest import Entry
from benchmarks.measurement import MEASURED, Measurement
from benchmarks.settings import Settings
from benchmarks.solvers import EXTRAS, NEWTON, SOLVERS, Solver
from benchmarks.solvers.solver import Attempt, Solution, attempt, scaling_error
from sinkformers import sinkhorn_limit

TOL = 1e-6
SAME = 1e-9  # weights are the kernel with rows and columns rescaled, up to this
PRODUCTS, ERROR = "products", "column error"
CURVE_TOL = 1e-12
BUDGETS = tuple(round(2 ** (power / 2)) for power in range(2, 21))  # products, from 2 to 1024


class SolverStep:
    """A solver at the setting that its check has found."""

    def __init__(self, solver: Solver, scores: Tensor, setting: float) -> None:
        self.solver, self.scores, self.setting = solver, scores, setting
        self.solution: Solution | None = None

    def reset(self) -> None:
        self.solution = None

    def call(self) -> None:
        self.solution = self.solver.solve(self.scores, self.setting)

    def outcome(self) -> list[Tensor]:
        assert self.solution is not None
        return [self.solution.weights]


def solver_label(n: int, std: float) -> str:
    return f"n = {n}, std {std:g}"


@functools.lru_cache(maxsize=4)
def draw_scores(n: int, std: float) -> Tensor:
    """Draw scores (n, n) of attention with head size 64 in float64."""
    inputs = draw(Case(1, 1, n, std=std))
    query, key = inputs.query[0, 0].double(), inputs.key[0, 0].double()
    return query @ key.mT / math.sqrt(query.shape[-1])


def pick_solvers(settings: Settings, *, ours: bool = False) -> list[Solver]:
    """Return the solvers that were asked for, and Newton's method always; `ours` leaves out the others."""
    if ours:
        return [SOLVERS[NEWTON]]
    asked = set(SOLVERS) - set(EXTRAS if settings.quick else ()) if settings.rows is None else set(settings.rows)
    return [solver for name, solver in SOLVERS.items() if name in asked | {NEWTON}]


def solver_entry(solver: Solver, n: int, std: float) -> Entry:
    """Return a solver as it is timed, with its products and the column error that it reaches."""
    made: list[Attempt] = []

    def check() -> Checked:
        scores = draw_scores(n, std)
        made.append(attempt(solver, scores, TOL))
        solution = made[0].solution
        found = {PRODUCTS: float(solution.products), ERROR: made[0].error}
        return Checked(scaling_error(scores, solution.weights), made[0].seconds, SAME, found)

    def build() -> SolverStep:
        return SolverStep(solver, draw_scores(n, std), made[0].setting)

    return Entry(solver.name, build, check, {"n": n}, compiled=solver.name in EXTRAS)


def curves(n: int, stds: tuple[float, ...]) -> Iterator[Measurement]:
    """Yield the column error of `sinkhorn_limit` against products, one curve per method and standard deviation."""
    for std in stds:
        for method in ("sinkhorn", "newton"):
            points = tuple(_points(draw_scores(n, std), method))
            yield Measurement("limit", solver_label(n, std), method, MEASURED, variant="curve", n=n, curve=points)


def _points(scores: Tensor, method: str) -> Iterator[tuple[float, float]]:
    taken = 0
    for budget in BUDGETS:
        _, info = sinkhorn_limit(scores, tol=CURVE_TOL, max_iters=budget, method=method, return_info=True)
        if int(info.products) > taken:
            taken = int(info.products)
            yield float(taken), float(info.residual)
        if info.converged:
            return
