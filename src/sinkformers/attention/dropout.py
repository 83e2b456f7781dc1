"""Dropout of attention weights from a seed: every entry has its own hash of (seed, head, row, column).

So the backward pass draws what the forward pass drew, no matrix is saved, and all backends draw the same.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sinkformers.core.registration import define, register_vmap

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that mixes every bit; in 64-bit integers, whose products wrap harmlessly."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def dropout_mask(
    seed: Tensor,
    heads: Tensor | None,
    lead: Sequence[int],
    n: int,
    m: int,
    dropout_p: float,
    like: Tensor,
    *,
    first_row: int = 0,
    first_column: int = 0,
) -> Tensor:
    """The factors of the weights (*lead, n, m): 0 or 1/(1 − p), in the dtype and on the device of `like`.

    `heads` (*lead) numbers the heads; without it they are numbered in order. The rows are those from `first_row` on,
    and the columns those from `first_column` on.
    """
    if dropout_p == 1:
        return like.new_zeros((*lead, n, m))
    if heads is None:
        heads = torch.arange(math.prod(lead), device=like.device).reshape(lead)
    seed = seed.to(like.device)
    key = _mix((_mix(_mix(seed & _WORD) ^ (seed >> 32)) + heads * 0x9E3779B9) & _WORD)
    rows, cols = (torch.arange(size, device=like.device) for size in (n, m))
    row_key = _mix((key[..., None] + (first_row + rows) * 0x85EBCA6B) & _WORD)
    bits = _mix((row_key[..., None] + (first_column + cols) * 0xC2B2AE35) & _WORD)
    return (bits >= int(dropout_p * 2**32)).to(like.dtype) / (1 - dropout_p)


def _dropout_mask(seed: Tensor, weights: Tensor, dropout_p: float) -> Tensor:
    *lead, n, m = weights.shape
    return dropout_mask(seed, None, lead, n, m, dropout_p, weights)


dropout_mask_operator = define("dropout_mask", _dropout_mask, lambda seed, weights, p: torch.empty_like(weights))
register_vmap(dropout_mask_operator, lambda args: True)
