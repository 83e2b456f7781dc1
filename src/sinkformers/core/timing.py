"""Time calls in turn, so that what disturbs the machine disturbs them all."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FEWEST, MOST = 3, 200  # rounds


class Seconds(NamedTuple):
    """The medians of both passes, and of their sum; backward is 0 where it was not timed."""

    forward: float
    backward: float
    together: float


Call = Callable[[], Tensor]


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_once(call: Call, inputs: Sequence[Tensor], device: torch.device) -> tuple[float, float]:
    """The seconds of one forward pass and of one backward pass to `inputs`; without inputs, of forward alone."""
    synchronize(device)
    start = time.perf_counter()
    out = call()
    synchronize(device)
    forward = time.perf_counter() - start
    if not inputs:
        return forward, 0.0
    d_out = torch.ones_like(out)
    synchronize(device)
    start = time.perf_counter()
    torch.autograd.grad(out, inputs, d_out, allow_unused=True)
    synchronize(device)
    return forward, time.perf_counter() - start


def time_in_turn(
    calls: Mapping[str, Call], inputs: Sequence[Tensor], device: torch.device, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """The seconds of both passes of each call by round, for about so many seconds in all.

    Each call must have been warmed up. There are three rounds at least.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    end, rounds = time.perf_counter() + seconds, 0
    while calls and (rounds < FEWEST or (time.perf_counter() < end and rounds < MOST)):
        for name, call in calls.items():
            times[name].append(time_once(call, inputs, device))
        rounds += 1
    return times


def medians(times: Sequence[tuple[float, float]]) -> Seconds:
    """The medians, of three rounds at least; of two in the middle the lower one."""
    forward, backward = zip(*times, strict=True)
    together = [sum(each) for each in times]
    return Seconds(*(sorted(part)[(len(times) - 1) // 2] for part in (forward, backward, together)))


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
