"""What our attention modules share: `Heads`, which conversion puts its own settings into, and how tokens are split."""

from typing import Literal

from torch import Tensor, nn

from sinkformers.attention import masks, sinkhorn_attention
from sinkformers.core import checks


class Heads(nn.Module):
    """Heads (batch, heads, n, d) that attend to others (batch, heads, m, d), `n_iters` normalisations each.

    Args:
        n_iters, tau: as in `sinkhorn`.
        scale: of the dot products; 1/√d if not given.
        dropout: of the weights, while training.
    """

    num_heads: int

    def __init__(self, n_iters: int, tau: float, scale: float | None = None, dropout: float = 0.0) -> None:
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
        """The output (batch, heads, n, e); masks (batch, n) and (batch, m) are True at the tokens that take part."""
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


class SoftMaxOnly(nn.Module):
    """Attention that must stay SoftMax, because a column sum would run over later positions of a sequence that is
    being written: that of its own positions, `"causal"`, or that to a source, `"cross"`."""

    kind: Literal["causal", "cross"]


def head_width(caller: str, dim: int, num_heads: int, head_dim: int | None) -> int:
    """`head_dim`, or the equal share of `dim` where it is not given."""
    if num_heads < 1 or (head_dim is not None and head_dim < 1):
        got = f"num_heads={num_heads}" + ("" if head_dim is None else f", head_dim={head_dim}")
        raise ValueError(f"{caller}: num_heads and head_dim must be whole numbers ≥ 1; got {got}.")
    if head_dim is None and dim % num_heads:
        raise ValueError(
            f"{caller}: num_heads must divide dim, or head_dim be given; got num_heads={num_heads}, dim={dim}."
        )
    return head_dim or dim // num_heads


def zero_masked(caller: str, name: str, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens (…, n, dim) with the masked ones set to zero; `mask` (…, n), an argument called `name`, is True at valid
    tokens.

    Every module and model does this where masked tokens enter. What stands there, NaN included, would otherwise reach
    the gradients of projections, norms and feed-forward networks: their gradients multiply it by zero.
    """
    if mask is None:
        return tokens
    checks.mask(caller, name, mask, tokens.shape[:-1], "the tokens")
    return masks.zero_masked(tokens, mask)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Tokens (…, n, heads·d) as heads (…, heads, n, d)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def join_heads(heads: Tensor) -> Tensor:
    """Heads (…, heads, n, d) as tokens (…, n, heads·d)."""
    return heads.transpose(-3, -2).flatten(-2)
