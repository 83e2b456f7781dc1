"""Compare every backend with float64: output and gradients, in each dtype, on each device."""

import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkformers.attention import backend_for, sinkhorn_attention
from sinkformers.core import sinkhorn
from sinkformers.core.agreement import deviation, tolerance
from sinkformers.core.call import NormalizeCall
from sinkformers.core.normalize import BACKENDS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = ("native", "triton", "torch", "reference")
N, M, WIDTH = 67, 71, 32
TOL = 1e-5  # of the column sums at the limit
TIMES_TOL = 10.0  # how far outputs and gradients may then be off: potentials err a few times as much as sums
CONVERGED = 201  # normalisations after which float64 has converged, with the scores below


class Problem(NamedTuple):
    """One operator on fixed inputs."""

    name: str
    n_iters: int | float
    call: Callable[..., Tensor]  # of the tensors, and of backend and n_iters
    inputs: Callable[[], tuple[Tensor, ...]]  # in float64
    auto: Callable[..., str]  # the backend that `auto` takes for these tensors

    @property
    def exact_n_iters(self) -> int:
        return CONVERGED if self.n_iters == math.inf else int(self.n_iters)


class Finding(NamedTuple):
    """How far a backend is from float64, relative to the largest entry of each tensor; or why it was not compared."""

    device: torch.device
    problem: str
    n_iters: int | float
    backend: str
    dtype: torch.dtype
    output: float = math.nan
    gradients: float = math.nan
    allowed: float = 0.0
    cannot: str = ""  # why it does not serve the call
    raised: str = ""
    automatic: bool = False  # `auto` takes it

    @property
    def disagrees(self) -> bool:
        return bool(self.raised) or not (self.cannot or self.worst <= self.allowed)

    @property
    def worst(self) -> float:
        """The larger deviation; NaN where one of them is."""
        return _largest([self.output, self.gradients])


def _tokens(rows: int = N, columns: int = M) -> tuple[Tensor, ...]:
    generator = torch.Generator("cpu").manual_seed(5)
    sizes = (rows, columns, columns)
    return tuple(torch.randn(2, 3, size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes)


def _masks(query: Tensor, key: Tensor) -> dict[str, Any]:
    """Padding: the second sequence is shorter."""
    sizes = {"query_mask": query.shape[-2], "key_mask": key.shape[-2]}
    lengths = {name: torch.tensor([[size], [size - 13]], device=query.device) for name, size in sizes.items()}
    return {name: torch.arange(size, device=query.device) < lengths[name] for name, size in sizes.items()}


def _attention(query: Tensor, key: Tensor, value: Tensor, *, backend: str, n_iters: int | float) -> Tensor:
    tol = TOL if n_iters == math.inf else None
    return sinkhorn_attention(query, key, value, n_iters=n_iters, tol=tol, backend=backend, **_masks(query, key))


def _attention_auto(query: Tensor, key: Tensor, value: Tensor, *, n_iters: int | float) -> str:
    return backend_for(query, key, value, n_iters=n_iters, **_masks(query, key))


def _causal(query: Tensor, key: Tensor, value: Tensor, *, backend: str, n_iters: int | float) -> Tensor:
    return sinkhorn_attention(query, key, value, n_iters=n_iters, is_causal=True, backend=backend)


def _causal_auto(query: Tensor, key: Tensor, value: Tensor, *, n_iters: int | float) -> str:
    return backend_for(query, key, value, n_iters=n_iters, is_causal=True)


def _operator(scores: Tensor, *, backend: str, n_iters: int | float) -> Tensor:
    return sinkhorn(scores, n_iters=n_iters, mask=_operator_mask(scores), backend=backend)


def _operator_auto(scores: Tensor, *, n_iters: int | float) -> str:
    call = NormalizeCall(scores, _operator_mask(scores), None, None, None, int(n_iters))
    return BACKENDS.choose("doctor", "auto", call).name


def _operator_mask(scores: Tensor) -> Tensor:
    rows, columns = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
    return ((rows[:, None] + 2 * columns) % 7 > 0).expand(scores.shape)


PROBLEMS = (
    Problem("attention", 5, _attention, _tokens, _attention_auto),
    Problem("causal attention", 3, _causal, lambda: _tokens(M, M), _causal_auto),
    Problem("attention at the limit", math.inf, _attention, _tokens, _attention_auto),
    Problem("sinkhorn", 5, _operator, lambda: tuple(x[..., :11, :13] for x in _tokens()[:1]), _operator_auto),
)


def compare_all(device: torch.device) -> Iterator[Finding]:
    """The findings on one device. Warnings of failed self-checks are left to the caller."""
    for problem in PROBLEMS:
        for dtype in DTYPES:
            if device.type == "mps" and dtype == torch.float64:
                continue
            inputs = tuple(tensor.to(dtype).to(device) for tensor in problem.inputs())
            auto = problem.auto(*inputs, n_iters=problem.n_iters)
            for backend in NAMES:
                yield compare(problem, backend, dtype, device)._replace(automatic=backend == auto)


def compare(problem: Problem, backend: str, dtype: torch.dtype, device: torch.device) -> Finding:
    found = Finding(device, problem.name, problem.n_iters, backend, dtype)
    inputs = tuple(tensor.to(dtype).to(device) for tensor in problem.inputs())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a limit that half precision does not reach
            got = _outcome(problem, inputs, backend, problem.n_iters)
    except NotImplementedError as error:
        return found._replace(cannot=reason_of(error))
    except Exception as error:
        return found._replace(raised=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")
    exact = _exact(problem, dtype)
    sizes = {name: {name: tensor} for name, tensor in got.items()}
    worst = {name: deviation(part, {name: exact[name]}).size for name, part in sizes.items()}
    steps = 21 if problem.n_iters == math.inf else problem.n_iters
    allowed = tolerance(dtype, *_sizes(problem), int(steps)) + (TIMES_TOL * TOL if problem.n_iters == math.inf else 0.0)
    gradients = [size for name, size in worst.items() if name != "out"]
    return found._replace(output=worst["out"], gradients=_largest(gradients), allowed=allowed)


def _outcome(problem: Problem, inputs: tuple[Tensor, ...], backend: str, n_iters: int | float) -> dict[str, Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = problem.call(*leaves, backend=backend, n_iters=n_iters)
    generator = torch.Generator("cpu").manual_seed(6)
    d_out = torch.randn(out.shape, generator=generator, dtype=torch.float32).bfloat16().to(out)
    grads = torch.autograd.grad(out, leaves, d_out)
    return {"out": out, **{f"gradient {number}": grad for number, grad in enumerate(grads)}}


@cache
def _exact(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """The definition in float64 on the CPU, for inputs that are rounded to a dtype."""
    inputs = tuple(tensor.to(dtype).double() for tensor in problem.inputs())
    return _outcome(problem, inputs, "reference", problem.exact_n_iters)


def _sizes(problem: Problem) -> tuple[int, int]:
    first, *others = problem.inputs()
    return first.shape[-2], others[0].shape[-2] if others else first.shape[-1]


def _largest(sizes: list[float]) -> float:
    return math.nan if any(math.isnan(size) for size in sizes) else max(sizes)


def reason_of(error: NotImplementedError) -> str:
    """Why a backend cannot serve a call, from the error of calling it by name."""
    text = str(error).partition("cannot serve this call: ")[2] or str(error)
    return text.partition('. backend="torch"')[0]
