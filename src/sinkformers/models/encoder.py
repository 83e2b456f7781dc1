"""The encoder of our text models: layers of self-attention over tokens, with masks for padding."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.modules import SelfAttention
from sinkformers.modules.heads import zero_masked

Norm = Literal["post", "pre"]


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between them, (…, dim) to (…, dim)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.widen(x)))


class Residual(nn.Module):
    """Norm and dropout of a residual branch: x + f(x), with a LayerNorm after the sum or before f."""

    def __init__(self, dim: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout, self.post = nn.LayerNorm(dim), nn.Dropout(dropout), norm == "post"

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of f."""
        return x if self.post else self.norm(x)

    def leave(self, x: Tensor, f: Tensor) -> Tensor:
        """Return the sum of x and the output of f."""
        x = x + self.dropout(f)
        return self.norm(x) if self.post else x


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each with a skip connection. `mask` as in `SelfAttention`."""

    def __init__(self, attention: SelfAttention, dim: int, hidden: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.attention, self.around_attention = attention, Residual(dim, norm, dropout)
        self.feed_forward, self.around_feed_forward = FeedForward(dim, hidden), Residual(dim, norm, dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.around_attention.leave(x, self.attention(self.around_attention.enter(x), mask))
        return self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))


class Encoder(nn.Module):
    """`depth` layers on tokens (batch, n, dim); with `norm="pre"` a LayerNorm after the last one."""

    def __init__(
        self,
        *,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        norm: Norm = "post",
        n_iters: int | float = 3,
        tau: float | str = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_norm("Encoder", norm)
        self.layers = nn.ModuleList(
            EncoderLayer(SelfAttention(dim, heads, n_iters=n_iters, tau=tau, bias=True), dim, hidden, norm, dropout)
            for _ in range(depth)
        )
        self.last = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return tokens (batch, n, dim); `mask` (batch, n) is True at valid tokens.

        Masked tokens change no valid output and no gradient.
        """
        x = self._enter(x, mask)
        for layer in self.layers:
            x = layer(x, mask)
        return self.last(x)

    def _enter(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the input of the first layer; masked tokens are zero."""
        return zero_masked("Encoder", "mask", x, mask)


def check_norm(caller: str, norm: str) -> None:
    if norm not in ("post", "pre"):
        raise ValueError(f'{caller}: norm must be "post", after each sum, or "pre", before each layer; got {norm!r}.')


def valid_numbers(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return token ids (batch, n) with 0 where masked, since padding may hold ids that the embedding does not have."""
    return tokens if mask is None else tokens.masked_fill(~mask, 0)


def sinusoids(length: int, dim: int) -> Tensor:
    """Return positions (length, dim) as in "Attention is all you need".

    Sines are in the even features and cosines in the odd ones, with wavelengths from 2π to 10,000 · 2π in a geometric
    sequence.
    """
    rates = torch.exp(-math.log(10_000.0) * torch.arange(0, dim, 2) / dim)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :dim]
