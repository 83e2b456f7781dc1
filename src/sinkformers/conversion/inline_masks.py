"""Masks that were added to scores, recognised by their values.

A model that computes SoftMax itself adds a large negative number where a query may not look. To SoftMax that is as good
as minus infinity, but column steps divide any finite number away, so that it has to be found and masked.
"""

import warnings

import torch
from torch import Tensor

from sinkformers.attention.one_way import is_one_way
from sinkformers.core.modes import readable

# A score at or below this is masked: −10,000 is the smallest mask in use, plus a score of up to 1,000.
MASKED = -9_000.0
# A score at or below this, and above MASKED, may be either.
PLAUSIBLE = -1_000.0
# A key whose weight under SoftMax is less than exp(−50) = 2e-22 for every query and head is hidden, not unpopular.
FAR = 50.0
# One whose weight is less than exp(−25) = 1e-11 may be either: unpopular, or hidden by −30, say.
UNCLEAR = 25.0

_REMEDY = (
    "Mask with -inf, the lowest number of the dtype or -10000 instead, leave the module out with `select`, or set "
    "n_iters=1."
)


def allowed_entries(
    caller: str, scores: Tensor, heads: int | None = None, *, allow_one_way: bool = False
) -> Tensor | None:
    """Return where scores (…, n, m) were not masked, or None if nowhere; raise where that cannot be decided.

    While a graph is traced nothing can be raised. There a key that no query sees is masked, whatever hides it, and
    numbers between −9,000 and −50 that order the tokens are not noticed.

    Args:
        caller: the module, for messages.
        heads: the number of heads, where scores (batch · heads, n, m) have them in their first axis.
        allow_one_way: accept a finite number that hides later tokens.
    """
    scores = scores.detach()
    if not readable(scores):
        allowed = ~(scores <= MASKED)
        seen = _over_heads(_within(scores, allowed, FAR), heads).any(-2)
        return allowed & _for_heads(seen, scores)[..., None, :]
    if not scores.numel():
        return None
    lowest, highest = torch.aminmax(scores)
    if highest - lowest < UNCLEAR and lowest > PLAUSIBLE:
        return None
    masked = scores <= MASKED
    if bool(((scores <= PLAUSIBLE) & ~masked).any()):
        raise ValueError(
            f"{caller}: scores between {MASKED:g} and {PLAUSIBLE:g} may be masked or not, and column steps would "
            f"divide a finite mask away; got {scores[(scores <= PLAUSIBLE) & ~masked].max().item():g}. {_REMEDY}"
        )
    allowed = ~masked
    joined = _over_heads(allowed, heads)
    seen = _over_heads(_within(scores, allowed, FAR), heads)
    if bool((joined.any(-2) & ~seen.any(-2)).any()):
        raise ValueError(
            f"{caller}: a key is hidden from every query by a finite number, since its weights under SoftMax are less "
            f"than exp(-{FAR:g}) in all heads; column steps would divide that away and attend to it. {_REMEDY}"
        )
    if not allow_one_way and _orders_by_finite_numbers(joined, seen):
        raise NotImplementedError(
            f"{caller}: a finite number hides later tokens from earlier ones, as in a causal mask, or the reverse; "
            f"outputs would depend on tokens that it hides. {_REMEDY}"
        )
    _warn_if_unclear(caller, joined, _over_heads(_within(scores, allowed, UNCLEAR), heads), allow_one_way)
    return allowed if bool(masked.any()) else None


def _within(scores: Tensor, allowed: Tensor, distance: float) -> Tensor:
    """Return where scores are allowed, and at most so far below the largest of their row."""
    return allowed & (scores >= scores.amax(-1, keepdim=True) - distance)


def _warn_if_unclear(caller: str, allowed: Tensor, seen: Tensor, allow_one_way: bool) -> None:
    """Warn if keys may be hidden by a number such as −30; it may also be that no query looks at them."""
    hidden = bool((allowed.any(-2) & ~seen.any(-2)).any())
    if hidden or (not allow_one_way and _orders_by_finite_numbers(allowed, seen)):
        warnings.warn(
            f"{caller}: {'a key has' if hidden else 'all later keys have'} SoftMax weights of less than "
            f"exp(-{UNCLEAR:g}) in all heads. If a finite number hides them, column steps divide that away and attend "
            f"to them. {_REMEDY}",
            stacklevel=4,
        )


def _orders_by_finite_numbers(allowed: Tensor, seen: Tensor) -> bool:
    """Return whether, among the pairs of tokens that no mask separates, finite numbers order the tokens of a sample."""
    if allowed.shape[-1] != allowed.shape[-2] or torch.equal(allowed, seen):
        return False
    valid = allowed.any(-1) & allowed.any(-2)
    # Pairs that a mask hides on either side are its own affair: whether it orders the tokens is asked later.
    return is_one_way(seen | ~(allowed & allowed.mT), valid, valid)


def without_self_padding(allowed: Tensor) -> Tensor:
    """Return a mask (…, n, n) without the tokens that no other token may look at, though they look at others.

    XLNet lets padding look at itself. In another model, this may be a token that reads the others. Two tokens at least
    must remain: of two, a causal mask does the same to the last.
    """
    n = allowed.shape[-1]
    others = allowed & ~torch.eye(n, dtype=torch.bool, device=allowed.device)
    padding = others.any(-1) & ~others.any(-2)
    remaining = (allowed.any(-1) & ~padding).sum(-1, keepdim=True)
    valid = ~(padding & (remaining > 1))
    return allowed & valid[..., None] & valid[..., None, :]


def _over_heads(entries: Tensor, heads: int | None) -> Tensor:
    """Return the entries (batch, n, m) that any head has; heads are the third axis from behind, or in the first."""
    if entries.dim() == 3 and heads is not None and entries.shape[0] % heads == 0:
        entries = entries.unflatten(0, (-1, heads))
    return entries.any(-3) if entries.dim() > 3 else entries


def _for_heads(keys: Tensor, scores: Tensor) -> Tensor:
    """Return what `_over_heads` joined, with one axis less, as it broadcasts with scores less their rows."""
    if scores.dim() > 3:
        return keys.unsqueeze(-2)
    return keys.repeat_interleave(scores.shape[0] // keys.shape[0], 0) if scores.dim() == 3 else keys
