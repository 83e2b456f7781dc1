"""Masks that order the tokens, as a causal one does: detect, cache and refuse them.

A pair of tokens is one-way if one of them may look at the other and not the reverse. Where a square mask has one-way
pairs and all of them point to the same side of the diagonal, it orders the tokens. Column sums run over all queries and
break that order: with more than one normalisation, an output would depend on tokens that the mask hides from it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sinkformers.attention.mask_values import can_be_read, once, remembered
from sinkformers.core.ranges import masked_bias


def refuse_one_way(
    caller: str,
    mask: Tensor | None,
    queries: Tensor | None = None,
    keys: Tensor | None = None,
    *,
    remedy: str,
    hides: bool = False,
) -> None:
    """Raise where `is_one_way`, whose arguments these are, holds; `caller` and `remedy` go into the message."""
    if mask is not None and is_one_way(mask, queries, keys, hides=hides):
        raise NotImplementedError(
            f"{caller}: attn_mask must not order the tokens where more than one normalisation is made, since column "
            "sums run over all queries and outputs would depend on tokens that it hides; got one under which tokens "
            "look to one side of the diagonal only and those there may not look back, as in a causal mask. "
            f"{remedy}"
        )


def is_one_way(mask: Tensor, queries: Tensor | None = None, keys: Tensor | None = None, *, hides: bool = False) -> bool:
    """Whether some matrix of a mask has one-way pairs, all of which point to the same side of its diagonal.

    Tokens whose row or column is wholly masked are removed first.

    Args:
        mask: boolean (…, n, m), True where a query may look, or may not with `hides`; or a float bias. A matrix that is
            not square orders nothing, and neither does one that repeats along queries or keys: they are not read.
        queries, keys: boolean (…, n), True at valid tokens. They broadcast with the mask less its last axis.

    A mask is read once, and again when it was changed in place. Where values cannot be read the answer is no: while a
    graph is traced or captured, inside `torch.func`, and for tensors without values.
    """
    if not can_be_read(mask) or mask.dim() < 2 or mask.numel() == 0:
        return False
    n, m = mask.shape[-2:]
    if n != m or n == 1 or 0 in mask.stride()[-2:]:
        return False
    each = once(mask)
    if remembered(mask, "under no padding", lambda: _never_orders(each, hides)):
        return False
    if queries is None and keys is None:
        return remembered(mask, f"one-way {hides}", lambda: _orders(_visible(each, hides)))
    visible = _visible(each, hides)
    visible = visible if queries is None else visible & queries[..., None]
    return _orders(visible if keys is None else visible & keys[..., None, :])


def _never_orders(mask: Tensor, hides: bool) -> bool:
    """Whether a mask hides nothing, hides the same from all queries, or is symmetric.

    Whatever tokens are removed from it, it has no one-way pairs then. The cheapest comes first, and those that follow
    end at the first difference.
    """
    if mask.dtype == torch.bool:
        bits = mask.view(torch.uint8)  # whose minimum and maximum are many times faster than `all` and `any`
        hides_nothing = bits.amax() == 0 if hides else bits.amin() > 0
    else:
        hides_nothing = mask.amin() > masked_bias(mask.dtype)
        mask = mask if hides_nothing else _visible(mask, hides)
    return (
        bool(hides_nothing)
        or torch.equal(mask, mask[..., :1, :].expand_as(mask))
        or all(torch.equal(above, below) for _, above, below in _strips(mask))
    )


def _orders(visible: Tensor) -> bool:
    """The rule, for matrices (…, n, n) that are True where a query may look."""
    bits = visible.view(torch.uint8)
    valid = (bits.amax(-1) > 0) & (bits.amax(-2) > 0)
    forward = backward = torch.zeros(visible.shape[:-2], dtype=torch.bool, device=visible.device)
    for start, above, below in _strips(visible):
        rows, columns = above.shape[-2:]
        pairs = valid[..., start : start + rows, None] & valid[..., None, start : start + columns]
        pairs = (pairs & (above ^ below)).triu(1)  # one-way, each counted once
        forward = forward | (pairs & above).flatten(-2).any(-1)
        backward = backward | (pairs & below).flatten(-2).any(-1)
        if bool((forward & backward).all()):
            return False
    return bool((forward ^ backward).any())


def _strips(square: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Entries (…, rows, columns) on and above the diagonal, by strips of rows from `start` on, beside their mirror
    images. Narrow strips stay in the cache; an accelerator is given few, since it is waited for after each."""
    size = 64 if square.device.type == "cpu" else 1024
    for start in range(0, square.shape[-1], size):
        end = start + size
        yield start, square[..., start:end, start:], square[..., start:, start:end].mT


def _visible(mask: Tensor, hides: bool) -> Tensor:
    if mask.dtype == torch.bool:
        return ~mask if hides else mask
    return ~(mask <= masked_bias(mask.dtype))  # NaN hides nothing
