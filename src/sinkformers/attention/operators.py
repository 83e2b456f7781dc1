"""`sinkformers::attend`: query, key and value to output as one operator, with its exact gradient as another.

Between forward and backward only vectors are kept, a few per step, beside inputs and output. The output of tokens in
half precision is kept in float32: backward subtracts its product with the incoming gradient from numbers nearly as
large, which would magnify its rounding. The weights are recomputed, and so is the dropout, from its seed. The native
kernels serve where they can; a head whose scalings leave their range is recomputed in torch, in the log domain.
"""

from typing import Any

import torch
from torch import Tensor

from sinkformers.attention import hand_over, plain, tracing
from sinkformers.attention.dropout import all_heads
from sinkformers.attention.participants import Masks, centred, combine
from sinkformers.attention.plain import Gradients, Settings, Tokens
from sinkformers.core import backends
from sinkformers.core.kernel_domain import Steps
from sinkformers.core.operators import MaybeTensor, reduce_to, step_outputs
from sinkformers.core.problem import working_dtype
from sinkformers.core.registration import differentiable, full_precision, not_differentiable, register_vmap


def _tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    tau: MaybeTensor,
    seed: MaybeTensor,
    backend: str,
    l2: bool,
) -> Tokens:
    """The call in the dtype to work in; Triton reads half precision as it is, and widens what it has to."""
    dtype = working_dtype(query.dtype)
    heads = None if seed is None else all_heads(query.shape[:-2], query.device)
    tau = tau if tau is None else tau.to(query.device, dtype).expand(query.shape[:-2])
    if backend != "triton" or l2:  # half precision would round what is centred
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if l2:
        query, key = centred(query, key, combine(masks).keys)
    return Tokens(query, key, value, masks, tau, seed, heads)


def _for_kernel(tokens: Tokens, settings: Settings) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seed = None if tokens.seed is None else int(tokens.seed)
    return (tokens.query, tokens.key, tokens.value, *tokens.masks, tokens.tau, seed), settings._asdict()


def _native_forward(tokens: Tokens, settings: Settings) -> tuple[Tensor, Steps]:
    args, options = _for_kernel(tokens, settings)
    out, u, s, r, safe = backends.native().attention_forward(*args, **options)
    hand_over.mend_forward(out, safe, tokens, settings)
    return out, Steps(u, s, r, safe)


def _plain_forward(tokens: Tokens, settings: Settings) -> tuple[Tensor, Steps]:
    out, steps = plain.forward(tokens, settings)
    hand_over.mend_forward(out, steps.safe, tokens, settings)
    return out, steps


def _triton_forward(tokens: Tokens, settings: Settings) -> tuple[Tensor, Steps]:
    args, _ = _for_kernel(tokens, settings)
    out, f, excess = backends.triton().attention_forward(*args[:-1], tokens.seed, *settings)
    # Potentials in the place of scalings, and the row maxima before them; logarithms never leave their range.
    safe = torch.ones(f.shape[:-2], dtype=torch.bool, device=f.device)
    return out, Steps(f[..., 1:, :], excess, f[..., 0, :], safe)


def _triton_backward(
    d_out: Tensor, out: Tensor, tokens: Tokens, settings: Settings, steps: Steps, wants_bias: bool
) -> Gradients:
    args, _ = _for_kernel(tokens, settings)
    f = torch.cat([steps.r[..., None, :], steps.u], -2)
    saved = (*args[3:-1], tokens.seed, f, steps.s)
    return Gradients(*backends.triton().attention_backward(d_out, *args[:3], out, *saved, *settings, wants_bias))


_FORWARD = {"native": _native_forward, "triton": _triton_forward, "torch": _plain_forward, "traced": tracing.forward}


def _native_backward(
    d_out: Tensor, out: Tensor, tokens: Tokens, settings: Settings, steps: Steps, wants_bias: bool
) -> Gradients:
    args, options = _for_kernel(tokens, settings)
    saved = (out, steps.u, steps.s, steps.r)
    d_query, d_key, d_value, d_scores, d_tau, safe = backends.native().attention_backward(
        d_out, *args, saved=saved, wants_bias=wants_bias, **options
    )
    grads = Gradients(d_query, d_key, d_value, d_scores, d_tau)
    hand_over.mend_backward(grads, safe & steps.safe, d_out, tokens, settings)
    return grads


def _plain_backward(
    d_out: Tensor, out: Tensor, tokens: Tokens, settings: Settings, steps: Steps, wants_bias: bool
) -> Gradients:
    grads, safe = plain.backward(d_out, out, tokens, settings, steps, wants_bias=wants_bias)
    hand_over.mend_backward(grads, safe, d_out, tokens, settings)
    return grads


_BACKWARD = {
    "native": _native_backward,
    "triton": _triton_backward,
    "torch": _plain_backward,
    "traced": tracing.backward,
}


@full_precision
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: MaybeTensor,
    entries: MaybeTensor,
    queries: MaybeTensor,
    keys: MaybeTensor,
    tau: MaybeTensor,
    seed: MaybeTensor,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
    implicitly: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    backend, _, _ = backend.partition(":")
    tokens = _tokens(query, key, value, Masks(bias, entries, queries, keys), tau, seed, backend, l2)
    out, steps = _FORWARD[backend](tokens, Settings(n_iters, scale, l2, dropout_p))
    u, s, r, safe = (part.contiguous() for part in steps)
    return out, u, s, r, safe


attend_operator = torch.library.custom_op("sinkformers::attend", _attend, mutates_args=())


@attend_operator.register_fake
def _(query, key, value, bias, entries, queries, keys, tau, seed, n_iters, scale, l2, dropout_p, implicitly, backend):
    *leading, n, _ = query.shape
    out = query.new_empty(*leading, n, value.shape[-1], dtype=working_dtype(query.dtype))
    return out, *step_outputs(query, leading, n, key.shape[-2], n_iters)


@full_precision
def _attend_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: MaybeTensor,
    entries: MaybeTensor,
    queries: MaybeTensor,
    keys: MaybeTensor,
    tau: MaybeTensor,
    seed: MaybeTensor,
    out: Tensor,
    u: Tensor,
    s: Tensor,
    r: Tensor,
    safe: Tensor,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
    implicitly: bool,
    backend: str,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    backend, _, _ = backend.partition(":")
    tokens = _tokens(query, key, value, Masks(bias, entries, queries, keys), tau, seed, backend, l2)
    settings, steps = Settings(n_iters, scale, l2, dropout_p), Steps(u, s, r, safe)
    d_out = d_out.to(tokens.query.dtype)
    if not implicitly:
        grads = _BACKWARD[backend](d_out, out, tokens, settings, steps, wants_bias)
    else:
        if backend != "torch":  # the implicit gradient wants the weights, which torch makes from its own steps
            tokens = _tokens(query, key, value, tokens.masks, tau, seed, "torch", l2)
            _, steps = plain.forward(tokens, settings)
            d_out = d_out.to(tokens.query.dtype)
        grads = hand_over.implicit_backward(d_out, tokens, settings, steps, wants_bias)
    d_query, d_key, d_value, d_scores, d_tau = grads
    # What is not asked for comes as zeros; gradients must not share memory.
    unused = r.new_zeros(safe.shape)
    d_bias = unused
    if wants_bias and bias is not None:
        assert d_scores is not None
        d_bias = d_scores.sum_to_size(bias.shape).to(bias.dtype)
        d_bias = d_bias.clone() if d_bias is d_scores else d_bias
    d_tau = unused.clone() if d_tau is None else d_tau
    return d_query.to(query.dtype), d_key.to(query.dtype), d_value.to(query.dtype), d_bias, d_tau


attend_backward_operator = torch.library.custom_op("sinkformers::attend_backward", _attend_backward, mutates_args=())


@attend_backward_operator.register_fake
def _(d_out, query, key, value, bias, entries, queries, keys, tau, seed, out, u, s, r, safe, *settings):
    grads = [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]
    wants_bias = settings[-1]
    d_bias = bias.new_empty(bias.shape) if wants_bias and bias is not None else r.new_empty(safe.shape)
    return *grads, d_bias, r.new_empty(safe.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[9:]
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 15
    saved, wants_bias, wants_tau = ctx.saved_tensors, ctx.needs_input_grad[3], ctx.needs_input_grad[7]
    d_query, d_key, d_value, d_bias, d_tau = attend_backward(d_out, *saved, *ctx.settings, wants_bias)
    d_bias = d_bias if wants_bias else None
    return d_query, d_key, d_value, d_bias, None, None, None, reduce_to(d_tau, saved[7], wants_tau), *(None,) * 7


tracing.take_apart(attend_operator, _attend, backend=14)
tracing.take_apart(attend_backward_operator, _attend_backward, backend=20)
register_vmap(attend_operator, seed=8)
register_vmap(attend_backward_operator, seed=9)
_attend_differentiably = differentiable(attend_operator, _save, _backward)
attend_backward = not_differentiable(attend_backward_operator)


def attend(*args: Any) -> tuple[Tensor, ...]:
    """The operator; inside `torch.compile` the torch backend is one that can be taken apart."""
    if args[-1] == "torch" and torch.compiler.is_compiling():
        args = (*args[:-1], tracing.TORCH)
    return _attend_differentiably(*args)
