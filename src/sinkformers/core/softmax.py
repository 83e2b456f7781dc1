"""`sinkformers::softmax`: torch's SoftMax over rows, at its price, with zeros in empty rows.

`torch.softmax` returns NaN for a row of minus infinities. NaN in the gradient of a masked entry spoils its row, and NaN
at a valid entry spoils the masked ones of its row. All of that shows in the first column, so that on the CPU reading
that column is the only cost where it does not happen.
"""

from typing import Any

import torch
from torch import Tensor

from sinkformers.core.registration import define, differentiable, register_vmap


def _clean(first_column: Tensor) -> bool:
    """Whether there is nothing to correct. On an accelerator reading would synchronise: correct in any case."""
    return first_column.device.type == "cpu" and not bool(first_column.isnan().any())


def _softmax(scores: Tensor) -> Tensor:
    weights = torch.softmax(scores.contiguous(), -1)
    if _clean(weights[..., 0]):
        return weights
    return weights.masked_fill_(scores == -torch.inf, 0.0)


def _softmax_backward(d_weights: Tensor, weights: Tensor) -> Tensor:
    gradient = torch.ops.aten._softmax_backward_data
    grad = gradient(d_weights.contiguous(), weights, -1, weights.dtype)
    if _clean(grad[..., 0]):
        return grad
    masked = weights == 0
    grad = gradient(d_weights.masked_fill(masked, 0.0).contiguous(), weights, -1, weights.dtype)
    return grad.masked_fill_(masked, 0.0)


def _like_last(*tensors: Tensor) -> Tensor:
    return torch.empty_like(tensors[-1], memory_format=torch.contiguous_format)


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


_OPERATOR = define("softmax", _softmax, _like_last)
_BACKWARD_OPERATOR = define("softmax_backward", _softmax_backward, _like_last)
register_vmap(_OPERATOR)
register_vmap(_BACKWARD_OPERATOR)
softmax = differentiable(_OPERATOR, _softmax, _save, _backward, _forward_mode)
softmax_backward = differentiable(_BACKWARD_OPERATOR, _softmax_backward, _save_gradient, _second, tensors_at=(0, 1))
