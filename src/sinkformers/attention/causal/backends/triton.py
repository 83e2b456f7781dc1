"""Causal attention by the Triton kernels, for GPUs."""

import torch
from torch import Tensor

from sinkformers.attention.backends.triton import lowest_bias, prepared, why_not_tokens
from sinkformers.attention.causal.call import CausalAttentionCall, CausalAttentionResult
from sinkformers.core.backend import Backend
from sinkformers.core.problem import working_dtype


class Triton(Backend):
    """As for plain attention: not taken by `auto`, and in the log domain, where all heads are safe."""

    name = "triton"
    automatic = False

    def why_not(self, call: CausalAttentionCall) -> str | None:
        return why_not_tokens(call.query, call.value)

    def rows_per_block(self, call: CausalAttentionCall) -> int:
        from sinkformers.kernels import triton

        dtype = working_dtype(call.query.dtype) if call.l2 else call.query.dtype
        return triton.block_rows(dtype.itemsize, call.query.shape[-1], call.value.shape[-1])

    def forward(self, call: CausalAttentionCall) -> CausalAttentionResult:
        from sinkformers.kernels import triton

        out, received, expected, starts = triton.causal_forward(prepared(call), lowest_bias(call))
        safe = torch.ones(out.shape[:-2], dtype=torch.bool, device=out.device)
        return CausalAttentionResult(out, received, expected, starts, safe)

    def backward(
        self, call: CausalAttentionCall, result: CausalAttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        from sinkformers.kernels import triton

        call = prepared(call)
        grads = triton.causal_backward(
            call,
            lowest_bias(call),
            d_out=d_output.to(call.query.dtype),
            out=result.out,
            starts=result.starts,
            needs_bias=needed["bias"],
        )
        return dict(zip(("query", "key", "value", "bias", "tau"), grads, strict=True))
