"""Causal attention by the Triton kernels, for GPUs."""

from collections.abc import Hashable

import torch
from torch import Tensor

from sinkformers.attention.backends.triton import kind_of, lowest_bias, prepared, why_not_tokens
from sinkformers.attention.causal.call import CausalAttentionCall, CausalAttentionResult
from sinkformers.core.backend import Backend
from sinkformers.core.backends.triton import is_gpu, launching_on
from sinkformers.core.problem import working_dtype


class Triton(Backend):
    """As for plain attention: taken by `auto` after a self-check, and in the log domain, where all heads are safe."""

    name = "triton"

    def automatic(self, call: CausalAttentionCall) -> bool:
        return is_gpu(call.query.device)

    def kind(self, call: CausalAttentionCall) -> Hashable:
        return kind_of(call), call.triangle, call.received is None, call.expected is None

    def why_not(self, call: CausalAttentionCall) -> str | None:
        return why_not_tokens(call.query, call.value)

    def rows_per_block(self, call: CausalAttentionCall) -> int:
        from sinkformers.kernels import triton

        dtype = working_dtype(call.query.dtype) if call.l2 else call.query.dtype
        return triton.block_rows(dtype.itemsize, call.query.shape[-1], call.value.shape[-1])

    def forward(self, call: CausalAttentionCall) -> CausalAttentionResult:
        from sinkformers.kernels import triton

        with launching_on(call.query.device):
            out, received, expected, starts = triton.causal_forward(prepared(call), lowest_bias(call))
        safe = torch.ones(out.shape[:-2], dtype=torch.bool, device=out.device)
        return CausalAttentionResult(out, received, expected, starts, safe)

    def backward(
        self, call: CausalAttentionCall, result: CausalAttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        from sinkformers.kernels import triton

        call = prepared(call)
        with launching_on(call.query.device):
            grads = triton.causal_backward(
                call,
                lowest_bias(call),
                d_out=d_output.to(call.query.dtype),
                out=result.out,
                starts=result.starts,
                needs_bias=needed["bias"],
            )
        return dict(zip(("query", "key", "value", "bias", "tau"), grads, strict=True))
