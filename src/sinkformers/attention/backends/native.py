"""Attention by the compiled CPU kernels; heads whose scalings leave their range are recomputed in torch."""

from typing import Any

import torch
from torch import Tensor

from sinkformers.attention import log_domain
from sinkformers.attention.backends.torch import implicit_gradients
from sinkformers.attention.call import AttentionCall, AttentionResult, Gradients
from sinkformers.core.backend import Backend
from sinkformers.core.backends.native import missing_warning, why_not_on
from sinkformers.core.description import describe
from sinkformers.core.ranges import SAFE_PRODUCT, masked_bias

_TENSORS = [field.name for field in describe(AttentionCall).tensors]


class Native(Backend):
    name = "native"

    def why_not(self, call: AttentionCall) -> str | None:
        return why_not_on(call.query.device) or _unknown_tensors(call)

    def warning(self, call: AttentionCall) -> str | None:
        return missing_warning(call.query.device)

    def forward(self, call: AttentionCall) -> AttentionResult:
        from sinkformers.kernels import native

        call = call.in_working_dtype()
        result = AttentionResult(*native.attention_forward(*_arguments(call)))
        log_domain.recompute_output(call, result.out, result.safe)
        return result

    def backward(
        self, call: AttentionCall, result: AttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        if call.implicit:
            return implicit_gradients(call, d_output, needed)
        call = call.in_working_dtype()
        d_out = d_output.to(call.query.dtype)
        saved = {"out": result.out, "u": result.rows, "s": result.cols, "r": result.shift}
        lead, bias = call.query.shape[:-2], call.bias if needed["bias"] else None
        bias_lead = None if bias is None else _summed_lead(bias, lead) if result.safe.all() else lead
        grads, safe = _gradients(call, d_out, saved, bias_lead)
        if bias_lead not in (None, lead) and not safe.all():  # one head that is not safe would spoil the sum
            grads, safe = _gradients(call, d_out, saved, lead)
        log_domain.recompute_gradients(call, d_out, grads, safe & result.safe)
        return grads._asdict()


def _gradients(
    call: AttentionCall, d_out: Tensor, saved: dict[str, Tensor], bias_lead: torch.Size | None
) -> tuple[Gradients, Tensor]:
    from sinkformers.kernels import native

    *grads, safe = native.attention_backward(*_arguments(call), d_out=d_out, saved=saved, bias_lead=bias_lead)
    return Gradients(*grads), safe


def _summed_lead(bias: Tensor, lead: torch.Size) -> torch.Size:
    """The leading axes of the bias's gradient, of size 1 where the kernels can sum: over heads, or all other axes."""
    if not lead:
        return lead
    *others, heads = bias.shape[:-2]
    whole = others if all(size == 1 for size in others) else lead[:-1]
    return torch.Size((*whole, heads))


def _arguments(call: AttentionCall) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """The tensors and the numbers of a call, by the names of the kernels' fields."""
    tensors = {name: getattr(call, name) for name in _TENSORS}
    seed = tensors.pop("seed")
    settings = {
        "n_iters": call.n_iters,
        "scale": call.scale,
        "l2": call.l2,
        "dropout_p": call.dropout_p,
        "drops": seed is not None,
        "seed": 0 if seed is None else int(seed),
        "masked_bias": 0.0 if call.bias is None else masked_bias(call.bias.dtype),
        "safe_product": SAFE_PRODUCT[call.query.dtype],
    }
    return tensors, settings


def _unknown_tensors(call: AttentionCall) -> str | None:
    from sinkformers.kernels import native

    known = native.attention_fields()
    unknown = [name for name in _TENSORS if name not in known and getattr(call, name) is not None]
    return f"the compiled kernels do not read {', '.join(unknown)}" if unknown else None
