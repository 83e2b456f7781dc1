"""`Heads`, the base class of our attention modules, and functions to split, join and mask tokens."""

from typing import Any, Literal

from torch import Tensor, nn

from sinkformers.attention import masks, sinkhorn_attention
from sinkformers.core import checks
from sinkformers.modules.representation import describe


class Heads(nn.Module):
    """Attention of heads (batch, heads, n, d) to heads (batch, heads, m, d) with `n_iters` normalisations.

    Args:
        n_iters, tau: as in `sinkhorn`.
        scale: factor of the dot products; 1/√d by default.
        dropout: probability of dropping a weight in training.
    """

    num_heads: int

    def __init__(self, n_iters: int | float, tau: float, scale: float | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        caller = type(self).__name__
        self.n_iters, self.tau = checks.iterations(caller, n_iters), checks.setting(caller, tau)
        self.scale, self.dropout = scale, dropout

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the output (batch, heads, n, e); masks (batch, n) and (batch, m) are True at valid tokens."""
        return sinkhorn_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            n_iters=self.n_iters,
            tau=self.tau,
            query_mask=query_mask,
            key_mask=key_mask,
        )

    def _settings(self) -> dict[str, Any]:
        """`n_iters` and `tau` as `extra_repr` shows them."""
        return {"n_iters": self.n_iters, "tau": self.tau}


class SoftMaxOnly(nn.Module):
    """Attention of a decoder, which must stay SoftMax: a column sum would run over later positions of the target.

    `kind` is `"causal"` for self-attention of the target, and `"cross"` for attention to the source.
    """

    kind: Literal["causal", "cross"]
    num_heads: int

    def extra_repr(self) -> str:
        return describe(num_heads=self.num_heads)


def head_width(caller: str, dim: int, num_heads: int, head_dim: int | None) -> int:
    """Return `head_dim`, or `dim // num_heads` if it is None."""
    if num_heads < 1 or (head_dim is not None and head_dim < 1):
        got = f"num_heads={num_heads}" + ("" if head_dim is None else f", head_dim={head_dim}")
        raise ValueError(f"{caller}: num_heads and head_dim must be whole numbers ≥ 1; got {got}.")
    if head_dim is None and dim % num_heads:
        raise ValueError(
            f"{caller}: num_heads must divide dim, or head_dim must be given; got num_heads={num_heads}, dim={dim}."
        )
    return head_dim or dim // num_heads


def zero_masked(caller: str, name: str, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return tokens (…, n, dim) with the masked ones set to zero; `mask` (…, n) is True at valid tokens.

    Every module and model does this to its input. The contents of masked tokens, NaN included, would otherwise reach
    the gradients of projections, norms and feed-forward networks, which multiply them by zero. `name` is the name of
    the argument `mask` in messages.
    """
    if mask is None:
        return tokens
    checks.mask(caller, name, mask, tokens.shape[:-1], "the tokens")
    return masks.zero_masked(tokens, mask)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return tokens (…, n, heads·d) as heads (…, heads, n, d)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def join_heads(heads: Tensor) -> Tensor:
    """Return heads (…, heads, n, d) as tokens (…, n, heads·d)."""
    return heads.transpose(-3, -2).flatten(-2)
