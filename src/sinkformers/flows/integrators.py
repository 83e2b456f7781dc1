"""Runge–Kutta methods as tables, and one function that integrates with any of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Velocity = Callable[[Tensor], Tensor]


class Tableau(NamedTuple):
    """An explicit method for `ẋ = v(x)`.

    The slope k_s is v at `x + h Σ_r stages[s][r] k_r`, and the step is `h Σ_s weights[s] k_s`.

    `embedded` has the weights of a second method, whose distance from the first estimates the error; it may be empty.
    """

    name: str
    order: int
    stages: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    embedded: tuple[float, ...] = ()
    embedded_order: int = 0


EULER = Tableau("Euler", 1, ((),), (1.0,))  # a residual network is this method
HEUN = Tableau("Heun", 2, ((), (1.0,)), (1 / 2, 1 / 2))
RK4 = Tableau("RK4", 4, ((), (1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6))
BOGACKI_SHAMPINE = Tableau(
    "Bogacki–Shampine",
    3,
    ((), (1 / 2,), (0.0, 3 / 4), (2 / 9, 1 / 3, 4 / 9)),
    (2 / 9, 1 / 3, 4 / 9, 0.0),
    (7 / 24, 1 / 4, 1 / 3, 1 / 8),
    2,
)
DORMAND_PRINCE = Tableau(
    "Dormand–Prince",
    5,
    (
        (),
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    ),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84, 0.0),
    (5179 / 57600, 0.0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40),
    4,
)
METHODS = (EULER, HEUN, RK4, BOGACKI_SHAMPINE, DORMAND_PRINCE)

# Step control: the safety factor, and how much a step may shrink or grow at once.
SAFETY, SHRINK, GROW = 0.9, 0.2, 5.0


def step(velocity: Velocity, x: Tensor, h: float, method: Tableau) -> tuple[Tensor, Tensor | None]:
    """Return the state after one step of size `h`, and the embedded method's error estimate or None."""
    slopes: list[Tensor] = []
    for row in method.stages:
        slopes.append(velocity(_combine(x, h, row, slopes)))
    if not method.embedded:
        return _combine(x, h, method.weights, slopes), None
    gap = [a - b for a, b in zip(method.weights, method.embedded, strict=True)]
    return _combine(x, h, method.weights, slopes), _combine(torch.zeros_like(x), h, gap, slopes)


def _combine(x: Tensor, h: float, factors: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    for factor, slope in zip(factors, slopes, strict=True):
        if factor:
            x = x + (h * factor) * slope
    return x


@dataclass(frozen=True, eq=False)
class Path:
    """The result of `integrate`: the states at each of `times`, stacked, and the numbers of steps and evaluations."""

    times: tuple[float, ...]
    states: Tensor
    accepted: int
    rejected: int
    evaluations: int


def integrate(
    velocity: Velocity,
    x: Tensor,
    times: Sequence[float],
    *,
    method: Tableau = DORMAND_PRINCE,
    h: float | None = None,
    rtol: float = 1e-8,
    atol: float = 1e-8,
    max_steps: int = 100_000,
    progress: Callable[[float], None] | None = None,
) -> Path:
    """Solve `ẋ = v(x)` from `x` at `times[0]`, and return the states at each of `times`.

    With `h` each interval is cut into equal steps, none longer than `h`. Without it steps are chosen so that the
    estimated error is within `atol + rtol·|x|` in every coordinate; the method must have an embedded one for that.
    `progress` is called with the time after each accepted step. A state that is not finite raises an `OverflowError`
    that names time and particle.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import integrate
        >>> path = integrate(lambda x: -x, torch.ones(1, dtype=torch.float64), (0.0, 1.0))
        >>> round(float(path.states[-1]), 6)
        0.367879
    """
    _check(times, method, h, rtol, atol)
    counted = _Counted(velocity)
    states, accepted, rejected = [x], 0, 0
    trial = h or _first_step(counted, x, times[-1] - times[0], method, rtol, atol)
    for begin, end in itertools.pairwise(times):
        t = begin
        if h is not None:
            trial = (end - begin) / max(1, math.ceil((end - begin) / h - 1e-9))
        while t < end:
            # Extend the step to the end if only a remainder of rounding would be left.
            length = end - t if t + trial * (1 + 1e-9) >= end else trial
            new, error = step(counted, x, length, method)
            if accepted + rejected >= max_steps:
                raise ValueError(f"integrate: {max_steps} steps reach only t = {t:.6g}; increase max_steps or rtol.")
            if h is None and error is not None:
                ratio = (error.abs() / (atol + rtol * torch.maximum(x.abs(), new.abs()))).max().item()
                grown = _scaled(length, ratio, method)
                if not ratio <= 1:
                    rejected, trial = rejected + 1, grown
                    _refuse_stall(t, trial, ratio)
                    continue
                trial = max(grown, trial) if length < trial else grown
            _refuse_overflow(new, t + length, length, method)
            x, accepted = new, accepted + 1
            t = end if length == end - t else t + length
            if progress is not None:
                progress(t)
        states.append(x)
    return Path(tuple(float(t) for t in times), torch.stack(states), accepted, rejected, counted.calls)


class _Counted:
    def __init__(self, velocity: Velocity) -> None:
        self.velocity, self.calls = velocity, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.velocity(x)


def _scaled(length: float, ratio: float, method: Tableau) -> float:
    if math.isnan(ratio) or math.isinf(ratio):
        return length * SHRINK
    factor = SAFETY * max(ratio, 1e-10) ** (-1 / (method.embedded_order + 1))
    return length * min(GROW, max(SHRINK, factor))


def _first_step(velocity: Velocity, x: Tensor, span: float, method: Tableau, rtol: float, atol: float) -> float:
    """Return a first step so short that no coordinate moves by more than tolerance^(1/order) allows."""
    speed = (velocity(x).abs() / (atol + rtol * x.abs())).max().item()
    return min(span, (1 / max(speed, 1e-300)) ** (1 / method.order)) if speed < math.inf else span


def _refuse_stall(t: float, trial: float, ratio: float) -> None:
    if trial < 1e-14 * max(1.0, abs(t)):
        raise ValueError(
            f"integrate: at t = {t:.6g} no step is short enough (error {ratio:.3g} times the tolerance at "
            f"{trial:.3g}); the velocity is not smooth there, or rtol and atol are below its precision."
        )


def _refuse_overflow(state: Tensor, t: float, length: float, method: Tableau) -> None:
    if state.isfinite().all():
        return
    lost = ~state.isfinite().reshape(len(state), -1).all(-1)
    raise OverflowError(
        f"integrate: at t = {t:.6g} particle {lost.nonzero()[0].item()} is no longer finite ({int(lost.sum())} of "
        f"{len(lost)} particles; {method.name}, step {length:.3g}). The flow expands or the step is too long: end "
        "earlier, decrease h, or change the sign of W_V."
    )


def _check(times: Sequence[float], method: Tableau, h: float | None, rtol: float, atol: float) -> None:
    if len(times) < 2 or any(not b > a for a, b in itertools.pairwise(times)):
        raise ValueError(f"integrate: times must increase, and must be at least two; got {tuple(times)}.")
    if h is not None and not 0 < h < math.inf:
        raise ValueError(f"integrate: h must be a positive number; got {h!r}.")
    if h is None and not method.embedded:
        raise ValueError(
            f"integrate: {method.name} has no error estimate, so h must be given; Dormand–Prince chooses it."
        )
    if not (rtol >= 0 and atol > 0):
        raise ValueError(f"integrate: rtol must be ≥ 0 and atol > 0; got {rtol!r} and {atol!r}.")
