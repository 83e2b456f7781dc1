"""Numbers about numbers: medians, quartiles, and straight lines through points."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The middle of some numbers, and the middle half of them."""

    median: float
    first: float
    third: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise ValueError("spread: needs at least one number, got none.")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, first, third, len(values))


def paired_ratio(row: Mapping[int, float], baseline: Mapping[int, float]) -> Spread | None:
    """The row's time over the baseline's, round by round; what slows a whole round down cancels."""
    return spread([row[r] / baseline[r] for r in row if r in baseline]) if set(row) & set(baseline) else None


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    if len(x) != len(y) or len(set(x)) < 2:
        raise ValueError(f"line: needs at least two points with different x; got {len(x)} and {len(y)} numbers.")
    slope, intercept = statistics.linear_regression(x, y)
    return intercept, slope


def exponent(n: Sequence[float], y: Sequence[float]) -> float:
    """The power p of y ≈ c·nᵖ, fitted in logarithms."""
    return line([math.log(value) for value in n], [math.log(value) for value in y])[1]
