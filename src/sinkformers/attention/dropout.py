"""Dropout of attention weights, drawn from a seed: every entry has its own hash of (seed, head, row, column).

So backward draws again what forward drew, nothing of size n × m is kept, and every backend draws the same.
"""

import torch
from torch import Tensor

from sinkformers.core.registration import register_vmap

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that stirs every bit; in 64-bit integers, whose products wrap harmlessly."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def kept(seed: Tensor, heads: Tensor, n: int, m: int, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """What the weights of the given heads (...) are multiplied with: 0 or 1/(1 − p), (..., n, m).

    A head is known by its place in the flattened leading axes.
    """
    if dropout_p == 1:
        return heads.new_zeros((*heads.shape, n, m), dtype=dtype)
    seed = seed.to(heads.device)
    key = _mix((_mix(_mix(seed & _WORD) ^ (seed >> 32)) + heads * 0x9E3779B9) & _WORD)
    rows, cols = (torch.arange(size, device=heads.device) for size in (n, m))
    row_key = _mix((key[..., None] + rows * 0x85EBCA6B) & _WORD)
    bits = _mix((row_key[..., None] + cols * 0xC2B2AE35) & _WORD)
    return (bits >= int(dropout_p * 2**32)).to(dtype) / (1 - dropout_p)


def all_heads(lead: torch.Size, device: torch.device) -> Tensor:
    """The places of all heads, in the shape of the leading axes."""
    return torch.arange(lead.numel(), device=device).reshape(lead)


@torch.library.custom_op("sinkformers::kept", mutates_args=())
def kept_operator(seed: Tensor, weights: Tensor, dropout_p: float) -> Tensor:
    *lead, n, m = weights.shape
    return kept(seed, all_heads(torch.Size(lead), weights.device), n, m, dropout_p, weights.dtype)


@kept_operator.register_fake
def _(seed, weights, dropout_p):
    return weights.new_empty(weights.shape)


register_vmap(kept_operator, seed=0)
