"""`sinkformers::normalize`: scores to weights as one operator, with its exact gradient as another.

All tensors arrive with the leading axes of the scores or with ones in their place; `sinkhorn` sees to that.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from sinkformers.core import unrolled
from sinkformers.core.kernel_domain import Steps
from sinkformers.core.problem import pose, working_dtype
from sinkformers.core.registration import differentiable, full_precision, not_differentiable, register_vmap

# torch reads the operators' schemas from these annotations, and older versions know Optional only.
MaybeTensor = Optional[Tensor]  # noqa: UP045


def step_outputs(like: Tensor, lead: Sequence[int], n: int, m: int, n_iters: int) -> tuple[Tensor, ...]:
    """Tensors of the shapes of `Steps`, for tracing."""
    like = like.new_empty(0, dtype=working_dtype(like.dtype))
    n_rows, n_cols = (n_iters + 1) // 2, n_iters // 2
    vectors = [like.new_empty(*lead, *shape) for shape in ((n_rows, n), (n_cols, m), (n,), (m,))]
    return (*vectors, like.new_empty(lead, dtype=torch.bool))


@torch.library.custom_op("sinkformers::normalize", mutates_args=())
@full_precision
def normalize_operator(
    scores: Tensor, mask: MaybeTensor, row_mass: MaybeTensor, col_mass: MaybeTensor, tau: MaybeTensor, n_iters: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = pose(scores, mask, row_mass, col_mass)
    tau = tau if tau is None else tau.to(problem.scores)
    weights, steps = unrolled.forward(problem, tau, n_iters)
    u, s, r, c, safe = (part.contiguous() for part in steps)
    return weights.to(scores.dtype), u, s, r, c, safe


@normalize_operator.register_fake
def _(scores, mask, row_mass, col_mass, tau, n_iters):
    *lead, n, m = scores.shape
    return torch.empty_like(scores, memory_format=torch.contiguous_format), *step_outputs(scores, lead, n, m, n_iters)


@torch.library.custom_op("sinkformers::normalize_backward", mutates_args=())
@full_precision
def normalize_backward_operator(
    d_weights: Tensor,
    scores: Tensor,
    mask: MaybeTensor,
    row_mass: MaybeTensor,
    col_mass: MaybeTensor,
    tau: MaybeTensor,
    u: Tensor,
    s: Tensor,
    r: Tensor,
    c: Tensor,
    safe: Tensor,
    n_iters: int,
) -> tuple[Tensor, Tensor]:
    problem = pose(scores, mask, row_mass, col_mass)
    tau = tau if tau is None else tau.to(problem.scores)
    steps = Steps(u, s, r, c, safe)
    weights, kernel = unrolled.reopen(problem, tau, n_iters, steps)
    d_weights = d_weights.to(weights.dtype, copy=True)
    grad, d_tau = unrolled.backward(problem, tau, n_iters, steps, kernel, weights, d_weights)
    return grad.to(scores.dtype), r.new_zeros(safe.shape) if d_tau is None else d_tau


@normalize_backward_operator.register_fake
def _(d_weights, scores, mask, row_mass, col_mass, tau, u, s, r, c, safe, n_iters):
    return torch.empty_like(scores, memory_format=torch.contiguous_format), r.new_empty(safe.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.n_iters = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if d_weights is None:
        return (None,) * 6
    scores, mask, row_mass, col_mass, tau, *steps = ctx.saved_tensors
    d_scores, d_tau = normalize_backward(d_weights, scores, mask, row_mass, col_mass, tau, *steps, ctx.n_iters)
    return d_scores, None, None, None, reduce_to(d_tau, tau), None


def reduce_to(gradient: Tensor, tensor: Tensor | None) -> Tensor | None:
    """The gradient of a tensor that was broadcast, in its own shape and dtype."""
    return None if tensor is None else gradient.sum_to_size(tensor.shape).to(tensor.dtype)


register_vmap(normalize_operator)
register_vmap(normalize_backward_operator)
normalize = differentiable(normalize_operator, _save, _backward)
normalize_backward = not_differentiable(normalize_backward_operator)
