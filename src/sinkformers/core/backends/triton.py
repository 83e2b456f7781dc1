"""`sinkhorn` of small matrices by a Triton kernel, for GPUs."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from sinkformers.core.call import NormalizeBackend, NormalizeCall, NormalizeResult
from sinkformers.core.problem import working_dtype
from sinkformers.core.state import no_state

LARGEST = 64


class Triton(NormalizeBackend):
    """Not taken by `auto`: correct in Triton's interpreter, and compiled for GPUs, but not yet run on one."""

    name = "triton"
    automatic = False

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
        weights = triton.tiny_forward(*self._operands(call), call.n_iters).reshape(shape)
        return NormalizeResult(weights.to(call.scores.dtype), *no_state(weights, shape[:-2], *shape[-2:]))

    def backward(
        self, call: NormalizeCall, result: NormalizeResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        from sinkformers.kernels import triton

        (scores, tau), shape = self._operands(call), call.scores.shape
        grad, d_tau = triton.tiny_backward(d_output.to(scores.dtype).reshape(scores.shape), scores, tau, call.n_iters)
        # NaN at a valid entry must not reach a masked one. Checking whether there is any would synchronise.
        grad = grad.masked_fill(scores == -torch.inf, 0.0)
        return {"scores": grad.reshape(shape), "tau": None if d_tau is None else d_tau.reshape(shape[:-2])}

    def _operands(self, call: NormalizeCall) -> tuple[Tensor, Tensor | None]:
        """Scores (batch, n, m), minus infinity where masked, and tau (batch)."""
        scores, tau, lead = call.scores.to(working_dtype(call.scores.dtype)), call.working_tau(), call.scores.shape[:-2]
        scores = scores if call.mask is None else scores.masked_fill(~call.mask, -torch.inf)
        return scores.reshape(-1, *scores.shape[-2:]), None if tau is None else tau.expand(lead).reshape(-1)


def why_not_on(device: torch.device) -> str | None:
    """The reason why the Triton kernels cannot be used on a device, or None where they can."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install '.[triton]' in your clone"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the Triton kernels are for GPUs, and the tensors are on the CPU"
    return None
