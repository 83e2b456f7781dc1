"""`SelfAttention`: the attention that our own models are built on."""

from typing import Any

from torch import Tensor, nn

from sinkformers.attention import sinkhorn_attention
from sinkformers.core import checks
from sinkformers.modules.heads import head_width

CALLER = "SelfAttention"


class SelfAttention(nn.Module):
    """Multi-head self-attention of tokens (batch, n, dim), with heads of any size.

    Args:
        dim: width of the tokens.
        num_heads, head_dim: how many heads, and how wide each is; `head_dim` is `dim // num_heads` if not given.
        n_iters, tau: as in `sinkhorn`; `n_iters=1` is a Transformer's attention, with the same parameters.
        tie_qk: one projection for queries and keys, W_Q = W_K: scores are symmetric.
        bias: whether queries, keys and values have one; the output projection always has.
        dropout: of the weights, while training.

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
        n_iters: int = 3,
        tau: float = 1.0,
        tie_qk: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_width(CALLER, dim, num_heads, head_dim)
        self.n_iters, self.tau = checks.iterations(CALLER, n_iters), checks.setting(CALLER, tau)
        self.tie_qk, self.dropout = tie_qk, dropout
        inner = self.num_heads * self.head_dim
        self.project = nn.Linear(dim, (2 if tie_qk else 3) * inner, bias=bias)
        self.out = nn.Linear(inner, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend; `mask` (batch, n) is True at the tokens that take part, as queries and as keys."""
        heads = self.project(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        query, key, value = heads[0], heads[-2], heads[-1]
        return self.out(self._attend(query, key, value, mask).transpose(1, 2).flatten(2))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """The output of heads (batch, heads, n, head_dim)."""
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"n_iters": self.n_iters, "tau": self.tau, "query_mask": mask, "key_mask": mask}
        return sinkhorn_attention(query, key, value, None, dropout, **options)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, n_iters={self.n_iters}, tau={self.tau}, tie_qk={self.tie_qk}"
