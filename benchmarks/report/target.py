"""A target, its verdict, and the measurements that decide it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.measurement import Measurement

Suites = dict[str, list[Measurement]]
OURS = "native"


@dataclass(frozen=True)
class Target:
    """`value` is None where the records do not say. `show` writes value and bound alike.

    With `at_least`, what was measured is at least `value`, and may be more.
    """

    text: str
    bound: float
    value: float | None
    at_most: bool = True
    show: Callable[[float], str] = "{:.3f}".format
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.at_least and not self.at_most and self.value < self.bound:
            return "undecided"
        return "met" if (self.value <= self.bound if self.at_most else self.value >= self.bound) else "**missed**"

    @property
    def wanted(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.show(self.bound)}"

    @property
    def measured(self) -> str:
        if self.value is None:
            return "–"
        return f"at least {self.show(self.value)}" if self.at_least else self.show(self.value)


def find(
    found: Iterable[Measurement], row: str, shape: str, n_iters: int | float | None = None, variant: str = ""
) -> Measurement | None:
    """The measurement of a row that has a number to show."""
    for m in found:
        if (m.row, m.shape, m.variant) == (row, shape, variant) and n_iters in (None, m.n_iters) and not m.reason:
            return m
    return None


def quotient(above: Measurement | None, below: Measurement | None) -> float | None:
    """Times as ratios to the same baseline, so that what disturbed a round cancels; plain medians without one."""
    if above is None or below is None:
        return None
    if above.ratio and below.ratio and above.baseline == below.baseline:
        return above.ratio.median / below.ratio.median
    return above.seconds.median / below.seconds.median if above.seconds and below.seconds else None


def ratio(m: Measurement | None) -> float | None:
    return m.ratio.median if m and m.ratio else None
