"""Attention of tokens to themselves at the limit of Sinkhorn's algorithm: queries, keys and values are one.

The scores are symmetric and their exponentials positive semi-definite, which helps twice. The limit is reached at a
rate of ½ however sharp the scores are, where alternating may take ages; and its gradient solves a system whose
eigenvalues lie between 1 and 2.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkformers.attention.masks import centred, zero_masked


def limit_attention(tokens: Tensor, alive: Tensor | None, scale: float | Tensor) -> Tensor:
    """`K^∞ q` of tokens q (…, n, d) with scores `scale·q_i·q_j`, or `−½·scale·|q_i − q_j|²`: they have one limit.

    `alive` (…, n) is True at the tokens that take part; the others give zeros. The gradient is that of the limit, and
    the Jacobian is symmetric and positive semi-definite (docs/layers.md).
    """
    if tokens.shape[-2] == 0:
        return tokens
    tokens = zero_masked(tokens, alive)
    near, _ = centred(tokens, tokens, alive)  # an offset that all tokens share would only cost precision
    scores = scale * near @ near.mT
    half = 0.5 * scores.diagonal(dim1=-2, dim2=-1)
    scores = scores - half[..., None] - half[..., None, :]
    if alive is not None:
        scores = scores.masked_fill(~(alive[..., None] & alive[..., None, :]), -torch.inf)
    return zero_masked(_SymmetricLimit.apply(scores) @ tokens, alive)


class _SymmetricLimit(torch.autograd.Function):
    """The doubly stochastic `exp(C_ij + f_i + f_j)`, and the gradient along changes of C that are symmetric too."""

    @staticmethod
    def forward(scores: Tensor) -> Tensor:
        alive = scores.amax(-1) != -torch.inf
        f = torch.zeros_like(scores[..., 0])
        for _ in range(_steps(scores.dtype, 2) + 10):
            # The mean of an alternating step and of the f before it.
            f = torch.where(alive, 0.5 * (f - torch.logsumexp(scores + f[..., None, :], -1)), 0.0)
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
        for _ in range(_steps(side.dtype, 3)):  # (1 + P) x = side; with this step length the error falls to a third
            x = x + (2 / 3) * (side - x - weights @ x)
        return local - weights * (x + x.mT)


def _steps(dtype: torch.dtype, rate: int) -> int:
    """How many steps, each dividing the error by `rate`, lead from 1 to the rounding of a dtype."""
    return math.ceil(-math.log(torch.finfo(dtype).eps, rate))
