"""Time the backends beside torch's SDPA and eager SoftMax, on one device."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention import sinkhorn_attention
from sinkformers.core.timing import Call, time_in_turn, time_once

D = 64
N_ITERS = (3, 21)
SDPA = "sdpa"
BACKENDS = ("native", "triton", "torch")
SECONDS = 2.0  # of rounds, for each shape and dtype


class Shape(NamedTuple):
    heads: int  # in all samples
    n: int

    def __str__(self) -> str:
        return f"{self.heads} × {self.n}"


class Timed(NamedTuple):
    """The seconds of a row in each round, forward and backward, and those of SDPA beside it; or why there are none."""

    device: torch.device
    shape: Shape
    dtype: torch.dtype
    row: str
    n_iters: int | None
    seconds: tuple[float, ...] = ()
    sdpa: tuple[float, ...] = ()
    reason: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(own / base for own, base in zip(self.seconds, self.sdpa, strict=True))


def cases(device: torch.device) -> list[tuple[Shape, torch.dtype]]:
    """Large enough to be limited by the device rather than by the calls, small enough for one with 8 GB."""
    if device.type == "cpu":
        return [(shape, torch.float32) for shape in (Shape(64, 128), Shape(16, 512), Shape(4, 1024))]
    shapes = (Shape(512, 197), Shape(128, 512), Shape(64, 1024), Shape(8, 4096))
    return [(shape, dtype) for dtype in (torch.bfloat16, torch.float32) for shape in shapes]


def time_all(device: torch.device) -> Iterator[Timed]:
    for shape, dtype in cases(device):
        yield from time_case(device, shape, dtype, SECONDS)


def time_case(device: torch.device, shape: Shape, dtype: torch.dtype, seconds: float) -> list[Timed]:
    """All rows of one shape, each in every round."""
    generator = torch.Generator("cpu").manual_seed(7)
    heads = 8 if shape.heads % 8 == 0 else shape.heads
    size = (shape.heads // heads, heads, shape.n, D)
    tokens = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    rows: dict[tuple[str, int | None], Call] = {(SDPA, None): _call(F.scaled_dot_product_attention, tokens)}
    rows["softmax", None] = _call(_softmax, tokens)
    for backend in BACKENDS:
        for n_iters in N_ITERS:
            rows[backend, n_iters] = _call(sinkhorn_attention, tokens, n_iters=n_iters, backend=backend)
    reasons = {row: reason for row, call in rows.items() if (reason := _warm_up(call, tokens, device))}
    calls = {_key(row): call for row, call in rows.items() if row not in reasons}
    times = {row: [sum(each) for each in found] for row, found in time_in_turn(calls, tokens, device, seconds).items()}
    found = []
    for row in rows:
        timed = Timed(device, shape, dtype, *row)
        if row in reasons:
            found.append(timed._replace(reason=reasons[row]))
        else:
            sdpa = times.get(_key((SDPA, None)), times[_key(row)])
            found.append(timed._replace(seconds=tuple(times[_key(row)]), sdpa=tuple(sdpa)))
    return found


def _key(row: tuple[str, int | None]) -> str:
    return f"{row[0]} {row[1]}"


def _call(function: Callable[..., Tensor], tokens: list[Tensor], **options: object) -> Call:
    return lambda: function(*tokens, **options)


def _softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SoftMax attention as it is written by hand, with matrices in memory."""
    return ((query * D**-0.5) @ key.mT).softmax(-1) @ value


def _warm_up(call: Call, tokens: list[Tensor], device: torch.device) -> str:
    try:
        for _ in range(2):
            time_once(call, tokens, device)
    except NotImplementedError as error:
        return str(error).partition("cannot serve this call: ")[2].partition('. backend="torch"')[0] or str(error)
    except Exception as error:  # out of memory, for one
        return f"it raised {type(error).__name__}"
    return ""
