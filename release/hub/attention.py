"""Attention as an operator of torch, in the namespace of this build, with its gradient."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix
from .triton_kernels import attention_backward, attention_forward

MOST_FEATURES = 256


class Call(NamedTuple):
    """What the kernels read of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    entries: Tensor | None
    queries: Tensor | None
    keys: Tensor | None
    tau: Tensor | None
    n_iters: int
    scale: float
    l2: bool = False
    seed: Tensor | None = None
    dropout_p: float = 0.0

    def lowest_bias(self) -> float:
        """A bias at or below this means masked."""
        return 0.0 if self.bias is None else torch.finfo(self.bias.dtype).min / 2


def sinkhorn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    n_iters: int = 3,
    scale: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    tau: Tensor | None = None,
) -> Tensor:
    """Attend with weights whose rows, and after enough normalisations columns, sum to 1.

    Query (*lead, n, d), key (*lead, m, d) and value (*lead, m, e) give (*lead, n, e). `n_iters` counts normalisations:
    1 is SoftMax. `scale` is 1/√d unless given. `bias` is added to the scores (*lead, n, m), and the boolean `mask` is
    True where an entry is valid; `query_mask` (*lead, n) and `key_mask` (*lead, m) are True where a token is. `tau`
    (*lead) goes from SoftMax (0) to Sinkhorn (1). Masks, bias and tau are broadcast. Masked queries give zeros.
    """
    *lead, n, d = query.shape
    m, e = key.shape[-2], value.shape[-1]
    if key.shape != (*lead, m, d) or value.shape != (*lead, m, e):
        raise ValueError(
            f"query, key and value must be (*lead, n, d), (*lead, m, d) and (*lead, m, e); got {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}."
        )
    if min(n, m, d, e) < 1 or max(d, e) > MOST_FEATURES or query.dtype not in _DTYPES:
        raise ValueError(
            f"tokens must be float16, bfloat16 or float32 with 1 to {MOST_FEATURES} features, and one at least; got "
            f"{tuple(query.shape)} and {tuple(value.shape)} in {query.dtype}."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must share a dtype; got {query.dtype}, {key.dtype}, {value.dtype}.")
    if n_iters < 1:
        raise ValueError(f"n_iters must be at least 1; got {n_iters}.")
    out, _, _ = _attend(
        query,
        key,
        value,
        _ranked(bias, len(lead) + 2),
        _ranked(mask, len(lead) + 2),
        _ranked(query_mask, len(lead) + 1),
        _ranked(key_mask, len(lead) + 1),
        None if tau is None else tau.to(query.device, torch.float32).expand(lead),
        n_iters,
        1 / math.sqrt(d) if scale is None else scale,
    )
    return out.to(query.dtype)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _ranked(tensor: Tensor | None, rank: int) -> Tensor | None:
    """The tensor with axes of size 1 in front."""
    return None if tensor is None else tensor[(None,) * (rank - tensor.ndim)]


@torch.library.custom_op(add_op_namespace_prefix("attend"), mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    tau: Tensor | None,
    n_iters: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(query, key, value, bias, mask, query_mask, key_mask, tau, n_iters, scale)
    return attention_forward(call, call.lowest_bias())


@_attend.register_fake
def _(query, key, value, bias, mask, query_mask, key_mask, tau, n_iters, scale):
    *lead, n, _ = query.shape
    m, e = value.shape[-2:]
    sizes = ((n, e), ((n_iters + 1) // 2 + 1, n), (n_iters // 2, m))
    return tuple(query.new_empty(*lead, *size, dtype=torch.float32) for size in sizes)


@torch.library.custom_op(add_op_namespace_prefix("attend_backward"), mutates_args=())
def _attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    tau: Tensor | None,
    n_iters: int,
    scale: float,
    d_out: Tensor,
    out: Tensor,
    f: Tensor,
    excess: Tensor,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(query, key, value, bias, mask, query_mask, key_mask, tau, n_iters, scale)
    known = {"d_out": d_out.to(query.dtype), "out": out, "f": f, "excess": excess, "needs_bias": needs_bias}
    *tokens, d_bias, d_tau = attention_backward(call, call.lowest_bias(), **known)
    none = query.new_empty(0, dtype=torch.float32)
    return (*tokens, none if d_bias is None else d_bias, none.clone() if d_tau is None else d_tau)


@_attend_backward.register_fake
def _(query, key, value, bias, mask, query_mask, key_mask, tau, n_iters, scale, d_out, out, f, excess, needs_bias):
    *lead, n, _ = query.shape
    d_bias = (*lead, n, key.shape[-2]) if needs_bias else (0,)
    d_tau = tuple(lead) if tau is not None else (0,)
    others = (query.new_empty(size, dtype=torch.float32) for size in (d_bias, d_tau))
    return (*(x.new_empty(x.shape) for x in (query, key, value)), *others)


def _save(ctx, inputs, output):
    *tensors, ctx.n_iters, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_f, d_excess):
    *inputs, out, f, excess = ctx.saved_tensors
    if d_out is None:
        return (None,) * 10
    bias, tau = inputs[3], inputs[7]
    needs_bias, needs_tau = ctx.needs_input_grad[3], ctx.needs_input_grad[7]
    *tokens, d_bias, d_tau = _attend_backward(
        *inputs, ctx.n_iters, ctx.scale, d_out, out, f, excess, needs_bias and bias is not None
    )
    d_bias = d_bias.sum_to_size(bias.shape).to(bias.dtype) if needs_bias else None
    return (*tokens, d_bias, None, None, None, d_tau.to(tau.dtype) if needs_tau else None, None, None)


_attend.register_autograd(_backward, setup_context=_save)
