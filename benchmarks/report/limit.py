"""The section on the limit: attention, a whole model, the solvers; and their targets."""

from collections.abc import Iterator, Sequence

from benchmarks.measurement import Measurement
from benchmarks.report import bounds, tables
from benchmarks.report.target import OURS, Target, find, quotient
from benchmarks.solvers import NEWTON, POT
from benchmarks.suites.limit import MANY, MODEL
from benchmarks.suites.limit_entries import ERROR, PRODUCTS, TOL
from benchmarks.units import duration


def section(found: Sequence[Measurement]) -> str:
    """Return a table of attention, one of the model and one of the solvers, as far as there are records."""
    solvers = [m for m in found if m.shape.startswith("n = ")]
    model = [m for m in found if m.shape == MODEL]
    attention = [m for m in found if m not in solvers and m not in model]
    parts = [tables.grid(group, tables.shape, tables.label, tables.ratio_cell) for group in (attention, model)]
    return "\n\n".join(filter(None, [*parts, tables.grid(solvers, tables.label, tables.shape, solver_cell)]))


def solver_cell(m: Measurement) -> str:
    """Products and time, and the column error of a solver that stopped before it reached the tolerance."""
    if m.seconds is None or PRODUCTS not in m.fit:
        return "–"
    text = f"{m.fit[PRODUCTS]:.0f} products, {duration(m.seconds.median)}"
    return text if reached(m) else f"{text}, stopped at {m.fit[ERROR]:.0e}"


def reached(m: Measurement) -> bool:
    return m.fit[ERROR] <= TOL


def limit_targets(found: Sequence[Measurement]) -> Iterator[Target]:
    for shape, by_count in bounds.LIMIT.items():
        for n_iters, bound in by_count.items():
            value = quotient(find(found, OURS, shape, n_iters), find(found, OURS, shape, MANY))
            yield Target(f"{shape}, n_iters {n_iters}: time ÷ n_iters {MANY}", bound, value)
    for shape, most in bounds.LIMIT_PRODUCTS.items():
        ours = find(found, NEWTON, shape)
        value = ours.fit.get(PRODUCTS) if ours else None
        yield Target(f"{shape}: products of `sinkhorn_limit`", most, value, show="{:.0f}".format)
    for shape, bound in bounds.LIMIT_POT.items():
        yield _against_pot(found, shape, bound)


def _against_pot(found: Sequence[Measurement], shape: str, bound: float) -> Target:
    """POT's time over ours; a lower bound where POT has stopped before it reached the tolerance."""
    pot, ours, text = find(found, POT, shape), find(found, NEWTON, shape), f"{shape}: POT ÷ `sinkhorn_limit`"
    if pot is None or ours is None or pot.seconds is None or ours.seconds is None:
        return Target(text, bound, None, at_most=False)
    value = pot.seconds.median / ours.seconds.median
    return Target(text, bound, value, at_most=False, show="{:.1f}".format, at_least=not reached(pot))
