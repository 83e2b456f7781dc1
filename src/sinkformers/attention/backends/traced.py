"""What `torch.compile` sees of the torch backend: torch's own operations, and three small operators it cannot open.

The attention operators are decomposed when a graph is made functional, which is below autograd: what they save for
backward stays what their formulas save. Two things must not be decomposed. The fallback to the log domain depends on
values, so that it is an operator that does nothing where all heads are safe. And what backward recomputes must not be
recognised as what forward computed, or it would be saved: matrices, where vectors were.

This module is imported while torch compiles, and not before.
"""

from typing import Any

import torch
from torch import Tensor

from sinkformers.attention import kernel_domain, log_domain
from sinkformers.attention.call import AttentionCall, AttentionResult, Gradients
from sinkformers.core.backend import Backend
from sinkformers.core.description import describe
from sinkformers.core.registration import define

_CALL = describe(AttentionCall)
_ARGUMENTS = ", ".join(field.schema() for field in _CALL.fields)
_GRADIENTS = [field.name for field in _CALL.gradients]


class Traced(Backend):
    """The torch backend without branches on values."""

    name = "traced"

    def forward(self, call: AttentionCall) -> AttentionResult:
        call = call.in_working_dtype()
        out, state = kernel_domain.forward(call)
        out = out.contiguous()
        _RECOMPUTE_OUTPUT(*call, out, state.safe)
        return AttentionResult(out, *state)

    def backward(
        self, call: AttentionCall, result: AttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        call = call.in_working_dtype()
        d_out = d_output.to(call.query.dtype)
        one = _OPAQUE_COPY(d_out.new_ones(()), d_out)
        seed = None if call.seed is None else _OPAQUE_COPY(call.seed, d_out)
        apart = call.change(query=call.query * one, seed=seed)
        needs_bias = needed["bias"] and call.bias is not None
        grads, safe = kernel_domain.backward(
            apart, result.out, result.state(), d_out, needs_bias=needs_bias, traced=True
        )
        _RECOMPUTE_GRADIENTS(*call, d_out, safe, *grads)
        found = grads._asdict()
        # An output of the graph must not be a tensor that an operator in it has written to.
        return {name: grad if name != "bias" or grad is None else grad.clone() for name, grad in found.items()}


def _recompute_output(*args: Any) -> None:
    *call, out, safe = args
    log_domain.recompute_output(AttentionCall(*call), out, safe)


def _recompute_gradients(*args: Any) -> None:
    call, (d_out, safe, *grads) = AttentionCall(*args[: len(_CALL.fields)]), args[len(_CALL.fields) :]
    log_domain.recompute_gradients(call, d_out, Gradients(*grads), safe)


def _opaque_copy(number: Tensor, gradient: Tensor) -> Tensor:
    """The number, in a way that no compiler sees through; it is computed in the backward pass only."""
    return number.clone()


_WRITTEN = ", ".join(f"Tensor({letter}!)? d_{name}" for letter, name in zip("abcde", _GRADIENTS, strict=True))
_RECOMPUTE_OUTPUT = define(
    "recompute_output", _recompute_output, None, schema=f"({_ARGUMENTS}, Tensor(a!) out, Tensor safe) -> ()"
)
_RECOMPUTE_GRADIENTS = define(
    "recompute_gradients",
    _recompute_gradients,
    None,
    schema=f"({_ARGUMENTS}, Tensor d_out, Tensor safe, {_WRITTEN}) -> ()",
)
_OPAQUE_COPY = define("opaque_copy", _opaque_copy, lambda number, gradient: torch.empty_like(number))
