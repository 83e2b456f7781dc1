"""Interleaved rounds: each calls every row once, in turn, so that what disturbs the machine disturbs them all."""

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.steps import Step

SLOW = 3.0  # seconds: a row this slow is warmed up by its check alone, and has two rounds at least


@dataclass(frozen=True)
class Plan:
    """Seconds for all rounds together, and how many rounds a row has at least and at most."""

    budget: float
    least: int = 5
    most: int = 60


def interleave(
    steps: Mapping[str, Step],
    plan: Plan,
    *,
    known: Mapping[str, float] | None = None,
    always: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[int, float]]:
    """Seconds by row and round.

    Every row gets the same share of the budget, so a slow one skips rounds, evenly; `always` skips none. `known`
    are the seconds that a row took in a call before this one, its compilation not among them.
    """
    if not steps:
        return {}
    estimates = {name: _warm_up(step, clock, (known or {}).get(name, 0.0)) for name, step in steps.items()}
    share = plan.budget / len(steps)
    wanted = {name: rounds_for(seconds, share, plan) for name, seconds in estimates.items()}
    total = max(wanted.values())
    if always in wanted:
        wanted[always] = total
    times: dict[str, dict[int, float]] = {name: {} for name in steps}
    gc.collect()
    gc.disable()
    try:
        for turn in range(total):
            for name, step in steps.items():
                if is_called(turn, wanted[name], total):
                    times[name][turn] = _time(step, clock)
            on_round(turn + 1, total)
    finally:
        gc.enable()
    return times


def rounds_for(seconds: float, share: float, plan: Plan) -> int:
    least = min(plan.least, 2) if seconds > SLOW else plan.least
    return max(least, min(plan.most, math.floor(share / max(seconds, 1e-9))))


def is_called(turn: int, wanted: int, total: int) -> bool:
    """Spreads `wanted` rounds evenly over `total`, the first among them."""
    return turn == 0 or (turn * wanted) // total > ((turn - 1) * wanted) // total


def _warm_up(step: Step, clock: Callable[[], float], known: float) -> float:
    if known > SLOW:
        return known
    first = _time(step, clock)
    return first if first > SLOW else min(first, _time(step, clock))


def _time(step: Step, clock: Callable[[], float]) -> float:
    step.reset()
    start = clock()
    step.call()
    seconds = clock() - start
    step.reset()
    return seconds
