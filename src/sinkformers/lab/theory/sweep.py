"""The result of an experiment: a table of numbers, how they are measured, and fitted orders of convergence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sinkformers.flows import Measure


@dataclass(frozen=True)
class Sweep:
    """A table with one row per value of the parameter, the first column. `orders` are exponents fitted to columns."""

    title: str
    norm: str
    columns: tuple[str, ...]
    rows: tuple[tuple[float | str, ...], ...]
    orders: Mapping[str, float] = field(default_factory=dict)

    def column(self, name: str) -> list[float]:
        """Return the numbers of a column."""
        return [float(row[self.columns.index(name)]) for row in self.rows]


def sweep(
    title: str, norm: str, columns: Sequence[str], rows: Sequence[Sequence[float | str]], *, fitted: Sequence[str] = ()
) -> Sweep:
    """Return a `Sweep` with orders for the columns `fitted`."""
    plain = Sweep(title, norm, tuple(columns), tuple(tuple(row) for row in rows))
    parameter = plain.column(columns[0]) if fitted else []
    orders = {name: fitted_order(parameter, plain.column(name)) for name in fitted}
    return Sweep(plain.title, plain.norm, plain.columns, plain.rows, orders)


def fitted_order(parameter: Sequence[float], errors: Sequence[float]) -> float:
    """Return the slope of log error against log parameter, by least squares."""
    x, y = [math.log(value) for value in parameter], [math.log(value) for value in errors]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return across / sum((a - x_mean) ** 2 for a in x)


def extrapolated(parameter: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at parameter 0 of the polynomial through all points (Neville's algorithm)."""
    row = list(values)
    for width in range(1, len(row)):
        row = [
            (parameter[k] * row[k + 1] - parameter[k + width] * row[k]) / (parameter[k] - parameter[k + width])
            for k in range(len(row) - 1)
        ]
    return row[0]


def inside(measure: Measure, radius: float) -> Measure:
    """Return the particles within the box [−radius, radius]^d, with weights scaled to sum to 1."""
    kept = measure.points.abs().amax(-1) <= radius
    return Measure(measure.points[kept], measure.weights[kept] / measure.weights[kept].sum())


def constant(measure: Measure, values: Tensor, against: Tensor) -> float:
    """Return the constant c for which `c · against` is closest to `values` in L²(μ)."""
    return float(measure.integrate((values * against).sum(-1)) / measure.integrate(against.square().sum(-1)))
