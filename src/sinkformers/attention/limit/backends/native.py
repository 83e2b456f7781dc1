"""Attention at the limit by the compiled CPU kernels; heads whose numbers leave their range are recomputed in torch."""

from typing import Any

import torch
from torch import Tensor

from sinkformers.attention.backends.native import arguments_of, gradients_by_kernels, unread_tensors
from sinkformers.attention.call import AttentionCall
from sinkformers.attention.limit.backends import torch as in_torch
from sinkformers.attention.limit.call import LimitAttentionCall, LimitAttentionResult
from sinkformers.core.backend import Backend
from sinkformers.core.backends.native import missing_warning, why_not_on


class Native(Backend):
    name = "native"

    def why_not(self, call: LimitAttentionCall) -> str | None:
        return why_not_on(call.query.device) or unread_tensors(call.attention())

    def warning(self, call: LimitAttentionCall) -> str | None:
        return missing_warning(call.query.device)

    def forward(self, call: LimitAttentionCall) -> LimitAttentionResult:
        from sinkformers.kernels import native

        tokens = call.attention().in_working_dtype()
        (*lead, n, _), m, query = tokens.query.shape, tokens.key.shape[-2], tokens.query
        goal = in_torch.goal_of(call.tol, query.dtype, n, m)
        lift, residual, products = query.new_empty(*lead, m), query.new_empty(lead), query.new_empty(lead)
        out, (u, v, shift), safe = native.attention_forward(
            **_arguments(call, tokens, goal), lift=lift, residual=residual, products=products
        )
        assert safe is not None
        evidence = (residual, products.to(torch.int64), residual <= goal)
        result = LimitAttentionResult(out, u[..., 0, :], v[..., 0, :], shift, lift, safe, *evidence)
        if not safe.all():
            unsafe = ~safe
            again = in_torch.attend(tokens.select(unsafe), call.tol, call.max_iters)
            for whole, piece in zip(result, again, strict=True):
                whole[unsafe] = piece
        return result

    def backward(
        self, call: LimitAttentionCall, result: LimitAttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        tokens = call.attention().in_working_dtype()
        goal = in_torch.goal_of(call.tol, tokens.query.dtype, tokens.query.shape[-2], tokens.key.shape[-2])
        d_out = d_output.to(tokens.query.dtype)
        arguments = {
            **_arguments(call, tokens, goal),
            "d_out": d_out,
            "out": result.out,
            "state": [result.u[..., None, :], result.v[..., None, :], result.shift],
            "lift": result.lift,
        }
        # Around potentials as large as those that are not safe the kernels round otherwise than torch does.
        grads, safe = gradients_by_kernels(arguments, call.bias if needed["bias"] else None, result.safe)
        if safe is not None:
            part = LimitAttentionResult._make(None if each is None else each[~safe] for each in result)
            again = in_torch.gradients(
                tokens.select(~safe), part, d_out[~safe], call.tol, needs_bias=grads.bias is not None
            )
            for all_heads, piece in zip(grads, again, strict=True):
                if all_heads is not None and piece is not None:
                    all_heads[~safe] = piece
        return grads._asdict()


def _arguments(call: LimitAttentionCall, tokens: AttentionCall, goal: float) -> dict[str, Any]:
    """The arguments of the kernels; two iterations are what the vectors of the limit take the place of."""
    arguments = arguments_of(tokens)
    settings = (*arguments["settings"], ("tol", goal), ("max_products", call.max_iters))
    return {**arguments, "settings": settings, "n_iters": 2}
