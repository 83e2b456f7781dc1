"""Self-attention at the limit of Sinkhorn's algorithm, with the same tokens as queries, keys and values.

The scores are symmetric and their exponentials positive semi-definite, which has two advantages. The error halves with
each step however sharp the scores are, while alternating steps can converge very slowly. And the gradient solves a
system whose eigenvalues lie between 1 and 2. Newton's method (`core/limit_solver.py`) would have to solve less well
conditioned systems of its own for the same accuracy, that of rounding.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkformers.attention.masks import centred, zero_masked
from sinkformers.distributed import refuse_in_parallel


def limit_attention(tokens: Tensor, mask: Tensor | None, scale: float | Tensor) -> Tensor:
    """Return `K^∞ q` for tokens q (…, n, d) with scores `scale·q_i·q_j` or `−½·scale·|q_i − q_j|²`.

    Both scores have the same limit. `mask` (…, n) is True at valid tokens; outputs at the others are zero. The gradient
    is that of the limit, and the Jacobian is symmetric and positive semi-definite (docs/layers.md).
    """
    refuse_in_parallel("Attention at the symmetric limit", "it computes all weights of a sequence on one device.")
    if tokens.shape[-2] == 0:
        return tokens
    tokens = zero_masked(tokens, mask)
    near, _ = centred(tokens, tokens, mask)  # an offset common to all tokens would only cost precision
    scores = scale * near @ near.mT
    half = 0.5 * scores.diagonal(dim1=-2, dim2=-1)
    scores = scores - half[..., None] - half[..., None, :]
    if mask is not None:
        scores = scores.masked_fill(~(mask[..., None] & mask[..., None, :]), -torch.inf)
    return zero_masked(_SymmetricLimit.apply(scores) @ tokens, mask)


class _SymmetricLimit(torch.autograd.Function):
    """The doubly stochastic `exp(C_ij + f_i + f_j)`, with the gradient along symmetric changes of C."""

    @staticmethod
    def forward(scores: Tensor) -> Tensor:
        valid = scores.amax(-1) != -torch.inf
        f = torch.zeros_like(scores[..., 0])
        for _ in range(_steps(scores.dtype, 2) + 10):
            # The mean of an alternating step and of the previous f.
            f = torch.where(valid, 0.5 * (f - torch.logsumexp(scores + f[..., None, :], -1)), 0.0)
        return torch.exp(scores + f[..., None] + f[..., None, :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weights,) = ctx.saved_tensors
        local = 0.5 * weights * (grad + grad.mT)
        side = local.sum(-1, keepdim=True)
        x = torch.zeros_like(side)
        for _ in range(_steps(side.dtype, 3)):  # (1 + P) x = side; this step length divides the error by 3
            x = x + (2 / 3) * (side - x - weights @ x)
        return local - weights * (x + x.mT)


def _steps(dtype: torch.dtype, rate: int) -> int:
    """Return the number of steps, each dividing the error by `rate`, from 1 to the rounding of a dtype."""
    return math.ceil(-math.log(torch.finfo(dtype).eps, rate))
