"""`Heads`, the base class of our attention modules, and functions to split, join and mask tokens."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from sinkformers.attention import CacheLayer, masks, sinkhorn_attention
from sinkformers.core import checks
from sinkformers.core.causal import DEFINITIONS, causal_iterations
from sinkformers.modules.representation import describe

LEARNED = "learned"


class Heads(nn.Module):
    """Attention of heads (batch, heads, n, d) to heads (batch, heads, m, d) with `n_iters` normalisations.

    Args:
        n_iters, tau: as in `sinkhorn`. Where `num_heads` is given, `tau` may be `"learned"`: the sigmoid of the
            parameter `sinkhorn_tau`, one value per head, which starts at 0.5.
        scale: factor of the dot products; 1/√d by default.
        dropout: probability of dropping a weight in training.
        causal: `"streaming"` or `"prefix"` for `_attend_in_order`, as in `sinkhorn_attention`.
    """

    num_heads: int
    sinkhorn_tau: Tensor

    def __init__(
        self,
        n_iters: int | float,
        tau: float | str,
        scale: float | None = None,
        dropout: float = 0.0,
        *,
        causal: str | None = None,
        num_heads: int | None = None,
    ) -> None:
        super().__init__()
        caller = type(self).__name__
        self.n_iters, self.causal = checks.iterations(caller, n_iters), check_causal(caller, causal, n_iters)
        if num_heads is not None:
            self.num_heads = num_heads
        if num_heads is not None and isinstance(tau, str) and tau == LEARNED:
            self.tau, self.sinkhorn_tau = LEARNED, nn.Parameter(torch.zeros(num_heads))
        else:
            self.tau = checks.setting(caller, tau)
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
        return sinkhorn_attention(query, key, value, query_mask=query_mask, key_mask=key_mask, **self._options())

    def _attend_in_order(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        *,
        triangle: bool,
        cache: CacheLayer | None = None,
    ) -> Tensor:
        """Return the output of causal attention; with `triangle` no query sees a later key.

        `cache` holds the tokens before these; the masks are of the keys, the cached ones first.
        """
        masks: dict[str, Any] = {"query_mask": query_mask, "key_mask": key_mask}
        order: dict[str, Any] = {"is_causal": triangle, "causal": self.causal, "cache": cache}
        return sinkhorn_attention(query, key, value, **order, **masks, **self._options())

    def _options(self) -> dict[str, Any]:
        tau = self.sinkhorn_tau.sigmoid() if isinstance(self.tau, str) else self.tau
        dropout = self.dropout if self.training else 0.0
        return {"dropout_p": dropout, "scale": self.scale, "n_iters": self.n_iters, "tau": tau}

    def _settings(self) -> dict[str, Any]:
        """`n_iters`, `tau` and `causal` as `extra_repr` shows them."""
        return {"n_iters": self.n_iters, "tau": self.tau, "causal": self.causal}


class DecoderHeads(Heads):
    """Attention of a decoder, in which no position of the target may depend on a later one.

    Column sums run over positions of the target, so with `n_iters` > 1 rows are normalised in order. `n_iters=1` is
    SoftMax. `kind` is `"causal"` for self-attention of the target, and `"cross"` for attention to the source.
    """

    kind: Literal["causal", "cross"]

    def extra_repr(self) -> str:
        return describe(num_heads=self.num_heads, **self._settings())


def check_causal(caller: str, causal: Any, n_iters: Any) -> str | None:
    """Check the definition of causal attention, and that it has this number of normalisations."""
    if causal is not None:
        checks.one_of(caller, "causal", causal, DEFINITIONS)
        causal_iterations(caller, n_iters)
    return causal


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
