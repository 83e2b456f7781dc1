"""Attention by the compiled CPU kernels; heads whose scalings leave their range are recomputed in torch."""

from typing import Any

import torch
from torch import Tensor

from sinkformers.attention import log_domain
from sinkformers.attention.backends.torch import implicit_gradients
from sinkformers.attention.call import AttentionCall, AttentionResult, Gradients
from sinkformers.core.backend import Backend
from sinkformers.core.backends.native import both_safe, missing_warning, why_not_on
from sinkformers.core.description import describe
from sinkformers.core.ranges import SAFE_PRODUCT, masked_bias

_OPTIONAL = [field.name for field in describe(AttentionCall).tensors if field.optional]


class Native(Backend):
    name = "native"

    def why_not(self, call: AttentionCall) -> str | None:
        return why_not_on(call.query.device) or unread_tensors(call)

    def warning(self, call: AttentionCall) -> str | None:
        return missing_warning(call.query.device)

    def forward(self, call: AttentionCall) -> AttentionResult:
        from sinkformers.kernels import native

        call, half = call.in_working_dtype(), is_half(call)
        out, state, safe = native.attention_forward(**arguments_of(call, half=half))
        assert safe is not None
        log_domain.recompute_output(call, out, safe)
        u, s, r = state
        return AttentionResult(out, u, s, r, safe)

    def forward_eager(self, call: AttentionCall) -> AttentionResult:
        """The result with all vectors in the place of the first, and None for `safe` where all heads are."""
        from sinkformers.kernels import native

        call, half = call.in_working_dtype(), is_half(call)
        out, (state,), safe = native.attention_forward(**arguments_of(call, half=half), packed=True)
        if safe is not None:
            log_domain.recompute_output(call, out, safe)
        return AttentionResult._make((out, state, None, None, safe))

    def described(self, call: AttentionCall, result: AttentionResult) -> AttentionResult:
        from sinkformers.kernels import native

        (*lead, n, _), m = call.query.shape, call.key.shape[-2]
        return AttentionResult(result.out, *native.state_sizes(n, m, call.n_iters).unpack(result.rows, lead))

    def backward(
        self, call: AttentionCall, result: AttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        if call.implicit:
            return implicit_gradients(call, d_output, needed)
        call, half = call.in_working_dtype(), is_half(call)
        d_out = d_output if d_output.dtype == call.query.dtype else d_output.to(call.query.dtype)
        state = [part for part in (result.rows, result.cols, result.shift) if part is not None]
        arguments = {**arguments_of(call, half=half), "d_out": d_out, "out": result.out, "state": state}
        grads, safe = gradients_by_kernels(arguments, call.bias if needed["bias"] else None, result.safe)
        if safe is not None:
            log_domain.recompute_gradients(call, d_out, grads, safe)
        return grads._asdict()


def gradients_by_kernels(
    arguments: dict[str, Any], bias: Tensor | None, safe_forward: Tensor | None
) -> tuple[Gradients, Tensor | None]:
    """The gradients, and the heads (…) that are safe in both passes, None where all are; that of `bias` if given."""
    from sinkformers.kernels import native

    whole = arguments["tensors"]["query"].shape[:-2]
    bias_lead = None if bias is None else _summed_lead(bias, whole)
    found = native.attention_backward(**arguments, bias_lead=bias_lead)
    safe = both_safe(found[-1], safe_forward)
    safe = None if safe is None or safe.all() else safe
    if safe is not None and bias_lead not in (None, whole):  # one head that is not safe spoils a sum
        found = native.attention_backward(**arguments, bias_lead=whole)
    d_query, d_key, d_value, d_bias, d_tau, _ = found
    return Gradients(d_query, d_key, d_value, d_bias, d_tau), safe


def _summed_lead(bias: Tensor, lead: torch.Size) -> torch.Size:
    """The leading axes of the bias's gradient, of size 1 where the kernels can sum: over heads, or all other axes."""
    if not lead:
        return lead
    *others, heads = bias.shape[:-2]
    first = others if all(size == 1 for size in others) else lead[:-1]
    return torch.Size((*first, heads))


def is_half(call: AttentionCall) -> bool:
    """Whether all tokens are bfloat16, so that products may be computed in that precision."""
    return call.query.dtype == call.key.dtype == call.value.dtype == torch.bfloat16


def arguments_of(call: AttentionCall, *, half: bool = False) -> dict[str, Any]:
    """The arguments of the kernels; tensors and settings by the names of their fields, those left out being zero.

    `half` says that the tokens were bfloat16 before they were converted to the working dtype.
    """
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    for name in _OPTIONAL:
        if getattr(call, name) is not None:
            tensors[name] = getattr(call, name)
    settings = (("scale", call.scale), ("l2", call.l2), ("safe_product", SAFE_PRODUCT[call.query.dtype]))
    if call.bias is not None:
        settings += (("masked_bias", masked_bias(call.bias.dtype)),)
    if half:
        settings += (("half", True),)
    if call.seed is not None:
        settings += (("drops", True), ("dropout_p", call.dropout_p))
    seed = 0 if call.seed is None else int(tensors.pop("seed"))
    return {"tensors": tensors, "settings": settings, "n_iters": call.n_iters, "seed": seed}


def unread_tensors(call: AttentionCall) -> str | None:
    given = [name for name in _OPTIONAL if getattr(call, name) is not None]
    if not given:
        return None
    from sinkformers.kernels import native

    fields = native.attention_fields()
    unread = [name for name in given if name not in fields]
    return f"the compiled kernels do not read {', '.join(unread)}" if unread else None
