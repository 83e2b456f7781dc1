"""`sinkhorn` of small matrices by a Triton kernel, for GPUs."""

import os
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sinkformers.core.call import NormalizeBackend, NormalizeCall, NormalizeResult
from sinkformers.core.problem import working_dtype
from sinkformers.core.state import no_state

LARGEST = 64


class Triton(NormalizeBackend):
    """Taken by `auto` on GPUs after a self-check: nobody has run the kernels on all of them."""

    name = "triton"

    def automatic(self, call: NormalizeCall) -> bool:
        return is_gpu(call.scores.device)

    def kind(self, call: NormalizeCall) -> Hashable:
        """The sizes that a kernel is compiled for, powers of two, and what it is given."""
        sizes = [power_of_two(size) for size in (*call.scores.shape[-2:], max(1, call.n_iters // 2))]
        return call.scores.dtype, *sizes, call.n_iters == 1, call.n_iters % 2, call.tau is None, call.mask is None

    def why_not(self, call: NormalizeCall) -> str | None:
        shape = tuple(call.scores.shape[-2:])
        if max(shape) > LARGEST or call.has_masses():
            return f"it takes matrices up to {LARGEST} × {LARGEST} without masses, and these are {shape}"
        return why_not_on(call.scores.device)

    def keeps_state(self, call: NormalizeCall) -> bool:
        return False

    def forward(self, call: NormalizeCall) -> NormalizeResult:
        from sinkformers.kernels import triton

        shape = call.scores.shape
        with launching_on(call.scores.device):
            weights = triton.tiny_forward(*self._operands(call), call.n_iters).reshape(shape)
        return NormalizeResult(weights.to(call.scores.dtype), *no_state(weights, shape[:-2], *shape[-2:]))

    def backward(
        self, call: NormalizeCall, result: NormalizeResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        from sinkformers.kernels import triton

        (scores, tau), shape = self._operands(call), call.scores.shape
        d_weights = d_output.to(scores.dtype).reshape(scores.shape)
        with launching_on(scores.device):
            grad, d_tau = triton.tiny_backward(d_weights, scores, tau, call.n_iters)
        # NaN at a valid entry must not reach a masked one. Checking whether there is any would synchronise.
        grad = grad.masked_fill(scores == -torch.inf, 0.0)
        return {"scores": grad.reshape(shape), "tau": None if d_tau is None else d_tau.reshape(shape[:-2])}

    def _operands(self, call: NormalizeCall) -> tuple[Tensor, Tensor | None]:
        """Scores (batch, n, m), minus infinity where masked, and tau (batch)."""
        scores, tau, lead = call.scores.to(working_dtype(call.scores.dtype)), call.working_tau(), call.scores.shape[:-2]
        scores = scores if call.mask is None else scores.masked_fill(~call.mask, -torch.inf)
        return scores.reshape(-1, *scores.shape[-2:]), None if tau is None else tau.expand(lead).reshape(-1)


def is_gpu(device: torch.device) -> bool:
    """Whether `auto` may try the Triton kernels on a device; ROCm's devices are of type cuda too."""
    return device.type == "cuda"


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, which is where Triton launches, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def power_of_two(size: int) -> int:
    """The smallest power of two that is not smaller; sizes may be symbolic."""
    power = 1
    while power < size:
        power *= 2
    return power


def why_not_on(device: torch.device) -> str | None:
    """The reason why the Triton kernels cannot be used on a device, or None where they can."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install '.[triton]' in your clone"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the Triton kernels are for GPUs, and the tensors are on the CPU"
    return None
