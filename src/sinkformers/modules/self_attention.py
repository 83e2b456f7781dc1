"""`SelfAttention`: the attention that our own models are built on."""

from torch import Tensor, nn

from sinkformers.modules.heads import Heads, head_width, join_heads, zero_masked
from sinkformers.modules.representation import describe

CALLER = "SelfAttention"


class SelfAttention(Heads):
    """Multi-head self-attention of tokens (batch, n, dim), with heads of any size.

    Args:
        dim: number of features of a token.
        num_heads, head_dim: number of heads, and features of each; `head_dim` is `dim // num_heads` by default.
        n_iters, tau: as in `sinkhorn`; `n_iters=1` is a Transformer's attention, with the same parameters.
        tie_qk: use one projection for queries and keys, W_Q = W_K, so that scores are symmetric.
        bias: whether the projections of queries, keys and values have biases; the output projection always has one.
        dropout: probability of dropping a weight in training.

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
        tau: float = 1.0,
        tie_qk: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(n_iters, tau, dropout=dropout)
        self.num_heads, self.head_dim = num_heads, head_width(CALLER, dim, num_heads, head_dim)
        self.tie_qk = tie_qk
        inner = self.num_heads * self.head_dim
        self.project = nn.Linear(dim, (2 if tie_qk else 3) * inner, bias=bias)
        self.out = nn.Linear(inner, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output (batch, n, dim); `mask` (batch, n) is True at valid tokens.

        The contents of masked tokens change no valid output and no gradient. The output at masked tokens is the bias of
        the output projection.
        """
        x = self._enter(x, mask)
        heads = self.project(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        query, key, value = heads[0], heads[-2], heads[-1]
        return self.out(join_heads(self._attend(query, key, value, mask, mask)))

    def _enter(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the tokens that are projected; masked ones are zero."""
        return zero_masked(CALLER, "mask", x, mask)

    def extra_repr(self) -> str:
        options = {"tie_qk": self.tie_qk, "dropout": self.dropout}
        if self.num_heads * self.head_dim != self.project.in_features:
            options["head_dim"] = self.head_dim
        return describe(num_heads=self.num_heads, **self._settings(), **options)
