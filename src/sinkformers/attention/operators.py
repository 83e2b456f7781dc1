"""`sinkformers::attend`: query, key and value to output as one operator, with its exact gradient as another.

Between forward and backward only vectors are kept, a few per step, beside the inputs. The weights are made again, and
so is the dropout, from its seed.
"""

from typing import Any

import torch
from torch import Tensor

from sinkformers.attention.participants import Masks, Participants, combine, silence
from sinkformers.core import implicit, unrolled
from sinkformers.core.kernel_domain import Steps
from sinkformers.core.operators import MaybeTensor, reduce_to, step_outputs
from sinkformers.core.problem import Problem, pose, working_dtype
from sinkformers.core.registration import differentiable, full_precision, not_differentiable, register_vmap


def silenced(query: Tensor, key: Tensor, value: Tensor, who: Participants) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens in the dtype to work in, those out of the game set to zero."""
    dtype = working_dtype(query.dtype)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return silence(query, who.queries), silence(key, who.keys), silence(value, who.keys)


def attention_problem(query: Tensor, key: Tensor, who: Participants, scale: float, l2: bool) -> Problem:
    """The scores of silenced queries and keys, as a problem."""
    scores = (query * scale) @ key.mT
    if l2:  # |q|² shifts whole rows, which no weight depends on
        scores = scores - (0.5 * scale) * key.square().sum(-1)[..., None, :]
    if who.bias is not None:
        scores = scores + who.bias.to(scores.dtype)
    return pose(scores, who.entries, None, None)


def kept(seed: Tensor, shape: torch.Size, dropout_p: float, like: Tensor) -> Tensor:
    """What dropout multiplies the weights with: 0, or 1/(1 − p)."""
    if dropout_p == 1:
        return like.new_zeros(shape)
    generator = torch.Generator(like.device).manual_seed(int(seed))
    return like.new_empty(shape).bernoulli_(1 - dropout_p, generator=generator).div_(1 - dropout_p)


@torch.library.custom_op("sinkformers::kept", mutates_args=())
def kept_operator(seed: Tensor, weights: Tensor, dropout_p: float) -> Tensor:
    return kept(seed, weights.shape, dropout_p, weights)


@kept_operator.register_fake
def _(seed, weights, dropout_p):
    return weights.new_empty(weights.shape)


register_vmap(kept_operator, seed=0)


@torch.library.custom_op("sinkformers::attend", mutates_args=())
@full_precision
def attend_operator(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    who = combine(Masks(bias, entries, queries, keys))
    q, k, v = silenced(query, key, value, who)
    problem = attention_problem(q, k, who, scale, l2)
    weights, steps = unrolled.forward(problem, tau if tau is None else tau.to(q), n_iters)
    if seed is not None:
        weights *= kept(seed, weights.shape, dropout_p, weights)
    u, s, r, c, safe = (part.contiguous() for part in steps)
    return (weights @ v).to(query.dtype), u, s, r, c, safe


@attend_operator.register_fake
def _(query, key, value, bias, entries, queries, keys, tau, seed, n_iters, scale, l2, dropout_p, implicitly):
    *leading, n, _ = query.shape
    out = query.new_empty(*leading, n, value.shape[-1])
    return out, *step_outputs(query, leading, n, key.shape[-2], n_iters)


@torch.library.custom_op("sinkformers::attend_backward", mutates_args=())
@full_precision
def attend_backward_operator(
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
    u: Tensor,
    s: Tensor,
    r: Tensor,
    c: Tensor,
    safe: Tensor,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
    implicitly: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    steps = Steps(u, s, r, c, safe)
    who = combine(Masks(bias, entries, queries, keys))
    q, k, v = silenced(query, key, value, who)
    d_out = silence(d_out.to(q.dtype), who.queries)
    problem = attention_problem(q, k, who, scale, l2)
    tau = tau if tau is None else tau.to(q)
    weights, kernel = unrolled.reopen(problem, tau, n_iters, steps)
    d_weights = d_out @ v.mT
    dropout = None if seed is None else kept(seed, weights.shape, dropout_p, weights)
    d_value = (weights if dropout is None else weights * dropout).mT @ d_out
    if dropout is not None:
        d_weights *= dropout
    if implicitly:
        excess = unrolled.column_excess(problem, tau, n_iters, steps)
        grad, d_tau = implicit.gradient(weights, d_weights, None, tau, excess)
    else:
        grad, d_tau = unrolled.backward(problem, tau, n_iters, steps, kernel, weights, d_weights)
    d_key = scale * (grad.mT @ q)
    if l2:
        d_key -= scale * grad.sum(-2)[..., None] * k
    d_bias = grad.sum_to_size(bias.shape).to(bias.dtype) if wants_bias and bias is not None else r.new_zeros(safe.shape)
    return (
        (scale * (grad @ k)).to(query.dtype),
        d_key.to(query.dtype),
        d_value.to(query.dtype),
        # What is not asked for comes as zeros; gradients must not share memory.
        d_bias.clone() if d_bias is grad else d_bias,
        r.new_zeros(safe.shape) if d_tau is None else d_tau,
    )


@attend_backward_operator.register_fake
def _(
    d_out,
    query,
    key,
    value,
    bias,
    entries,
    queries,
    keys,
    tau,
    seed,
    u,
    s,
    r,
    c,
    safe,
    n_iters,
    scale,
    l2,
    dropout_p,
    implicitly,
    wants_bias,
):
    grads = [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]
    d_bias = bias.new_empty(bias.shape) if wants_bias and bias is not None else r.new_empty(safe.shape)
    return *grads, d_bias, r.new_empty(safe.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[9:]
    ctx.save_for_backward(*inputs[:9], *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 14
    saved, wants_bias = ctx.saved_tensors, ctx.needs_input_grad[3]
    d_query, d_key, d_value, d_bias, d_tau = attend_backward(d_out, *saved, *ctx.settings, wants_bias)
    d_bias = d_bias if wants_bias else None
    return d_query, d_key, d_value, d_bias, None, None, None, reduce_to(d_tau, saved[7]), *(None,) * 6


register_vmap(attend_operator, seed=8)
register_vmap(attend_backward_operator, seed=9)
attend = differentiable(attend_operator, _save, _backward)
attend_backward = not_differentiable(attend_backward_operator)
