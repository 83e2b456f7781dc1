"""The decoder of a translation model: causal SoftMax attention, for whole targets or token by token.

A column sum of causal attention, or of attention to a source, runs over later positions of the target, so with doubly
stochastic weights an output would depend on later positions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.models.encoder import FeedForward, Norm, Residual, check_norm
from sinkformers.modules.heads import SoftMaxOnly


class KeysValues(NamedTuple):
    """Keys and values (batch, heads, n, head_dim) for later tokens to attend to."""

    keys: Tensor
    values: Tensor

    def followed_by(self, keys: Tensor, values: Tensor) -> "KeysValues":
        return KeysValues(torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2))

    def select(self, rows: Tensor) -> "KeysValues":
        return KeysValues(self.keys[rows], self.values[rows])


class CausalAttention(SoftMaxOnly):
    """SoftMax self-attention in which no token attends to a later one."""

    kind = "causal"

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, past: KeysValues | None = None) -> tuple[Tensor, KeysValues]:
        """Return the output for tokens (batch, n, dim) that follow those in `past`, and the `past` of the next ones."""
        heads = self.project(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        known = KeysValues(heads[1], heads[2]) if past is None else past.followed_by(heads[1], heads[2])
        n, m = x.shape[1], known.keys.shape[2]
        mask = torch.ones(n, m, dtype=torch.bool, device=x.device).tril(m - n) if n > 1 else None
        attended = F.scaled_dot_product_attention(heads[0], *known, mask)
        return self.out(attended.transpose(1, 2).flatten(2)), known


class CrossAttention(SoftMaxOnly):
    """SoftMax attention of target tokens to the tokens of a source."""

    kind = "cross"

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.source, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def remember(self, memory: Tensor) -> KeysValues:
        """Return the keys and values of a source (batch, n, dim)."""
        heads = self.source(memory).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return KeysValues(heads[0], heads[1])

    def forward(self, x: Tensor, source: KeysValues, mask: Tensor) -> Tensor:
        """Return the output for target tokens x; `mask` (batch, n) is True at valid tokens of the source."""
        query = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, *source, mask[:, None, None])
        return self.out(attended.transpose(1, 2).flatten(2))


class LayerState(NamedTuple):
    """The keys and values of one layer: those of the source, and of the target so far."""

    source: KeysValues
    past: KeysValues | None = None

    def select(self, rows: Tensor) -> "LayerState":
        return LayerState(self.source.select(rows), None if self.past is None else self.past.select(rows))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, a feed-forward network, each with a skip connection."""

    def __init__(self, dim: int, heads: int, hidden: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.attention, self.around_attention = CausalAttention(dim, heads), Residual(dim, norm, dropout)
        self.cross, self.around_cross = CrossAttention(dim, heads), Residual(dim, norm, dropout)
        self.feed_forward, self.around_feed_forward = FeedForward(dim, hidden), Residual(dim, norm, dropout)

    def forward(self, x: Tensor, state: LayerState, mask: Tensor) -> tuple[Tensor, LayerState]:
        attended, past = self.attention(self.around_attention.enter(x), state.past)
        x = self.around_attention.leave(x, attended)
        x = self.around_cross.leave(x, self.cross(self.around_cross.enter(x), state.source, mask))
        x = self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))
        return x, LayerState(state.source, past)


class Decoder(nn.Module):
    """`depth` layers; with `norm="pre"` a LayerNorm after the last one."""

    def __init__(self, *, dim: int, depth: int, heads: int, hidden: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        check_norm("Decoder", norm)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads, hidden, norm, dropout) for _ in range(depth))
        self.last = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()

    def begin(self, memory: Tensor) -> list[LayerState]:
        """Return the states before the first token."""
        return [LayerState(layer.cross.remember(memory)) for layer in self.layers]  # pyright: ignore

    def forward(self, x: Tensor, states: list[LayerState], mask: Tensor) -> tuple[Tensor, list[LayerState]]:
        """Return the output for target tokens (batch, n, dim) that follow those in `states`, and the new states.

        `mask` (batch, m) is True at valid tokens of the source.
        """
        following = []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer(x, state, mask)
            following.append(state)
        return self.last(x), following
