"""`SelfAttention`: the attention that our own models are built on."""

from torch import Tensor, nn

from sinkformers.attention import CacheLayer
from sinkformers.distributed import refuse_in_parallel
from sinkformers.modules.heads import Heads, head_width, join_heads, zero_masked
from sinkformers.modules.representation import describe
from sinkformers.modules.rotary import check_rotary, rotated

CALLER = "SelfAttention"


class SelfAttention(Heads):
    """Multi-head self-attention of tokens (batch, n, dim), with heads of any size.

    Args:
        dim: number of features of a token.
        num_heads, head_dim: number of heads, and features of each; `head_dim` is `dim // num_heads` by default.
        n_iters, tau: as in `sinkhorn`; `n_iters=1` is a Transformer's attention, with the same parameters.
            `tau="learned"` adds the parameter `sinkhorn_tau`, whose sigmoid is the `tau` of each head.
        tie_qk: use one projection for queries and keys, W_Q = W_K, so that scores are symmetric.
        bias: whether the projections of queries, keys and values have biases; the output projection always has one.
        dropout: probability of dropping a weight in training.
        causal: `"streaming"` or `"prefix"`: no token sees a later one, and rows are normalised in order, as in
            `causal_sinkhorn`. `n_iters` is then odd; 1 is causal SoftMax.
        rotary: rotate queries and keys by their positions (Su et al. 2021), so that scores depend on distances.

    Examples:
        >>> import torch
        >>> from sinkformers.modules import SelfAttention
        >>> layer = SelfAttention(12, 3, head_dim=8, n_iters=5)
        >>> layer(torch.randn(2, 7, 12), mask=torch.arange(7) < torch.tensor([[7], [4]])).shape
        torch.Size([2, 7, 12])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        n_iters: int | float = 3,
        tau: float | str = 1.0,
        tie_qk: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        causal: str | None = None,
        rotary: bool = False,
    ) -> None:
        width = head_width(CALLER, dim, num_heads, head_dim)
        super().__init__(n_iters, tau, dropout=dropout, causal=causal, num_heads=num_heads)
        self.head_dim, self.tie_qk, self.rotary = width, tie_qk, rotary
        if rotary:
            check_rotary(CALLER, self.head_dim)
        inner = self.num_heads * self.head_dim
        self.project = nn.Linear(dim, (2 if tie_qk else 3) * inner, bias=bias)
        self.out = nn.Linear(inner, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, cache: CacheLayer | None = None) -> Tensor:
        """Return the output (batch, n, dim); `mask` (batch, n) is True at valid tokens.

        The contents of masked tokens change no valid output and no gradient. The output at masked tokens is the bias of
        the output projection.

        With `causal="streaming"`, `cache` is one layer of a `SinkhornCache` with the tokens before these, which are
        added to it; it takes no mask.
        """
        self._check_cache(mask, cache)
        x = self._enter(x, mask)
        heads = self.project(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        query, key, value = heads[0], heads[-2], heads[-1]
        if self.rotary:
            refuse_in_parallel("SelfAttention(rotary=True)", "its positions would count from this rank's first token.")
            first = 0 if cache is None else len(cache)
            query, key = rotated(query, first), rotated(key, first)
        if self.causal is None:
            return self.out(join_heads(self._attend(query, key, value, mask, mask)))
        return self.out(join_heads(self._attend_in_order(query, key, value, mask, mask, triangle=True, cache=cache)))

    def _check_cache(self, mask: Tensor | None, cache: CacheLayer | None) -> None:
        if cache is not None and self.causal is None:
            raise ValueError(f'{CALLER}: a cache is for causal attention. Build the module with causal="streaming".')
        if cache is not None and mask is not None:
            raise ValueError(f"{CALLER}: pass a mask or a cache, not both; texts in a cache are equally long.")

    def _enter(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the tokens that are projected; masked ones are zero."""
        return zero_masked(CALLER, "mask", x, mask)

    def extra_repr(self) -> str:
        options = {"tie_qk": self.tie_qk, "dropout": self.dropout, "rotary": self.rotary}
        if self.num_heads * self.head_dim != self.project.in_features:
            options["head_dim"] = self.head_dim
        return describe(num_heads=self.num_heads, **self._settings(), **options)
