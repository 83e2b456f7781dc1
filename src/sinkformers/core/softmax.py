"""`sinkformers::softmax`: torch's SoftMax over rows, at its price, that gives zeros where a row has nothing left.

A row of minus infinities comes out of `torch.softmax` as NaN, and NaN in the gradient of a masked entry spoils its row;
NaN that takes part spoils the masked entries of its row. All show in the first column, so that on the CPU looking there
is all they cost where they do not happen.
"""

from typing import Any

import torch
from torch import Tensor

from sinkformers.core.registration import differentiable, register_vmap


def _clean(first_column: Tensor) -> bool:
    """Whether there is nothing to mend. On an accelerator looking would mean waiting: mend in any case."""
    return first_column.device.type == "cpu" and not bool(first_column.isnan().any())


@torch.library.custom_op("sinkformers::softmax", mutates_args=())
def softmax_operator(scores: Tensor) -> Tensor:
    weights = torch.softmax(scores.contiguous(), -1)
    if _clean(weights[..., 0]):
        return weights
    return weights.masked_fill_(scores == -torch.inf, 0.0)


@torch.library.custom_op("sinkformers::softmax_backward", mutates_args=())
def softmax_backward_operator(d_weights: Tensor, weights: Tensor) -> Tensor:
    gradient = torch.ops.aten._softmax_backward_data
    grad = gradient(d_weights.contiguous(), weights, -1, weights.dtype)
    if _clean(grad[..., 0]):
        return grad
    out = weights == 0
    grad = gradient(d_weights.masked_fill(out, 0.0).contiguous(), weights, -1, weights.dtype)
    return grad.masked_fill_(out, 0.0)


@softmax_operator.register_fake
def _(scores):
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


@softmax_backward_operator.register_fake
def _(d_weights, weights):
    return torch.empty_like(weights, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.save_for_forward(output)


def _backward(ctx: Any, d_weights: Tensor) -> Tensor:
    return softmax_backward(d_weights, ctx.saved_tensors[0])


def _forward_mode(ctx: Any, tangent: Tensor) -> Tensor:
    """The Jacobian of SoftMax is symmetric."""
    return softmax_backward(tangent, ctx.saved_tensors[0])


def _save_gradient(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _second(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of W∘(D − Σ W∘D) in D and in W; torch's own operations, so there is no last derivative."""
    d_weights, weights = ctx.saved_tensors
    centre, along = (weights * d_weights).sum(-1, keepdim=True), (weights * grad).sum(-1, keepdim=True)
    return weights * (grad - along), grad * (d_weights - centre) - d_weights * along


register_vmap(softmax_operator)
register_vmap(softmax_backward_operator)
softmax = differentiable(softmax_operator, _save, _backward, _forward_mode)
softmax_backward = differentiable(softmax_backward_operator, _save_gradient, _second)
