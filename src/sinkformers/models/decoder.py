"""The decoder of a translation model: causal attention, for whole targets or token by token.

A column sum of causal attention, or of attention to a source, runs over positions of the target. With more than one
normalisation the rows are therefore normalised in order, so that no output depends on a later position.
"""

import copy
from typing import NamedTuple

from torch import Tensor, nn

from sinkformers.attention import CacheLayer
from sinkformers.models.encoder import FeedForward, Norm, Residual, check_norm
from sinkformers.modules.decoder_attention import CausalAttention, CrossAttention, KeysValues


class LayerState(NamedTuple):
    """What one layer keeps: keys and values of the source, and caches of the two attentions; None to keep nothing."""

    source: KeysValues
    past: CacheLayer | None = None
    cross: CacheLayer | None = None

    def select(self, rows: Tensor) -> "LayerState":
        """Return the state of the samples with indices `rows`; what the source has received is selected too."""
        state = self.copy()
        for cache in (state.past, state.cross):
            if cache is not None:
                cache.map(lambda tensor: tensor[rows])
        return state._replace(source=self.source.select(rows))

    def copy(self) -> "LayerState":
        """Return a state that can be continued without a change of this one; tensors are shared."""
        return LayerState(self.source, copy.copy(self.past), copy.copy(self.cross))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, a feed-forward network, each with a skip connection."""

    def __init__(
        self, dim: int, heads: int, hidden: int, norm: Norm, dropout: float, n_iters: int, tau: float | str
    ) -> None:
        super().__init__()
        settings = {"n_iters": n_iters, "tau": tau}
        self.attention, self.around_attention = CausalAttention(dim, heads, **settings), Residual(dim, norm, dropout)
        self.cross, self.around_cross = CrossAttention(dim, heads, **settings), Residual(dim, norm, dropout)
        self.feed_forward, self.around_feed_forward = FeedForward(dim, hidden), Residual(dim, norm, dropout)

    def forward(self, x: Tensor, state: LayerState, mask: Tensor) -> tuple[Tensor, LayerState]:
        state = state.copy()
        x = self.around_attention.leave(x, self.attention(self.around_attention.enter(x), state.past))
        x = self.around_cross.leave(x, self.cross(self.around_cross.enter(x), state.source, mask, state.cross))
        x = self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))
        return x, state


class Decoder(nn.Module):
    """`depth` layers; with `norm="pre"` a LayerNorm after the last one. `n_iters=1` is SoftMax in both attentions."""

    def __init__(
        self,
        *,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        norm: Norm,
        dropout: float,
        n_iters: int = 1,
        tau: float | str = 1.0,
    ) -> None:
        super().__init__()
        check_norm("Decoder", norm)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads, hidden, norm, dropout, n_iters, tau) for _ in range(depth))
        self.last = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()

    def begin(self, memory: Tensor, *, keep: bool = True) -> list[LayerState]:
        """Return the states before the first token. Without `keep` the whole target has to follow at once."""
        states = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            caches = (CacheLayer(), CacheLayer(grows=False)) if keep else ()
            states.append(LayerState(layer.cross.remember(memory), *caches))
        return states

    def forward(self, x: Tensor, states: list[LayerState], mask: Tensor) -> tuple[Tensor, list[LayerState]]:
        """Return the output for target tokens (batch, n, dim) that follow those in `states`, and the new states.

        `mask` (batch, m) is True at valid tokens of the source.
        """
        following = []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer(x, state, mask)
            following.append(state)
        return self.last(x), following
