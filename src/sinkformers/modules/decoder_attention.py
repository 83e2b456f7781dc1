"""The attentions of a decoder: of the target to itself, and to a source. No output depends on a later target token."""

from typing import NamedTuple

from torch import Tensor, nn

from sinkformers.attention import CacheLayer
from sinkformers.modules.heads import DecoderHeads, join_heads, split_heads


class KeysValues(NamedTuple):
    """Keys and values (batch, heads, n, head_dim) of a source."""

    keys: Tensor
    values: Tensor

    def select(self, rows: Tensor) -> "KeysValues":
        return KeysValues(self.keys[rows], self.values[rows])


class CausalAttention(DecoderHeads):
    """Self-attention in which no token attends to a later one; SoftMax at `n_iters=1`."""

    kind = "causal"

    def __init__(
        self, dim: int, num_heads: int, *, n_iters: int = 1, tau: float | str = 1.0, causal: str = "streaming"
    ) -> None:
        super().__init__(n_iters, tau, causal=causal, num_heads=num_heads)
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, cache: CacheLayer | None = None) -> Tensor:
        """Return the output for tokens (batch, n, dim) that follow those in `cache`, and add them to it."""
        query, key, value = (split_heads(each, self.num_heads) for each in self.project(x).chunk(3, -1))
        return self.out(join_heads(self._attend_in_order(query, key, value, triangle=True, cache=cache)))


class CrossAttention(DecoderHeads):
    """Attention of target tokens to the tokens of a source; SoftMax at `n_iters=1`."""

    kind = "cross"

    def __init__(
        self, dim: int, num_heads: int, *, n_iters: int = 1, tau: float | str = 1.0, causal: str = "streaming"
    ) -> None:
        super().__init__(n_iters, tau, causal=causal, num_heads=num_heads)
        self.query, self.source, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def remember(self, memory: Tensor) -> KeysValues:
        """Return the keys and values of a source (batch, n, dim)."""
        return KeysValues(*(split_heads(each, self.num_heads) for each in self.source(memory).chunk(2, -1)))

    def forward(self, x: Tensor, source: KeysValues, mask: Tensor, cache: CacheLayer | None = None) -> Tensor:
        """Return the output for target tokens x; `mask` (batch, n) is True at valid tokens of the source.

        `cache` holds what the source has received from earlier tokens of the target.
        """
        query = split_heads(self.query(x), self.num_heads)
        return self.out(join_heads(self._attend_in_order(query, *source, None, mask, triangle=False, cache=cache)))
