"""How a run was asked for."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import EXTRAS, ROWS, Row
from benchmarks.timing import Plan

NOT_QUICK = (*EXTRAS, "reference")
N_ITERS, QUICK_N_ITERS = (3, 5, 21), (5,)


@dataclass(frozen=True)
class Settings:
    quick: bool = False
    rows: tuple[str, ...] | None = None
    threads: int = 2
    budget: float = 1.0
    data: Path | None = None

    @property
    def n_iters(self) -> tuple[int, ...]:
        """The numbers of iterations that the suites compare."""
        return QUICK_N_ITERS if self.quick else N_ITERS

    def pick(self, names: Iterable[str]) -> list[Row]:
        """Those of a suite's rows that were asked for, and SDPA always: everything is divided by it."""
        asked = set(self.rows) if self.rows is not None else set(ROWS) - set(NOT_QUICK if self.quick else ())
        return [ROWS[name] for name in names if name in asked | {"sdpa"}]

    def plan(self, seconds: float, least: int = 5, most: int = 60) -> Plan:
        if self.quick:
            return Plan(0.15 * seconds * self.budget, least=3, most=15)
        return Plan(seconds * self.budget, least=least, most=most)
