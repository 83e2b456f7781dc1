"""The masks of `MultiheadAttention`: from the conventions of `nn.MultiheadAttention` to those of SDPA."""

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.masks import Masks, combine, zero_masked
from sinkformers.core import checks
from sinkformers.core.ranges import masked_bias

CALLER = "MultiheadAttention"


@overload
def as_ignored(padding: Tensor) -> Tensor: ...


@overload
def as_ignored(padding: None) -> None: ...


def as_ignored(padding: Tensor | None) -> Tensor | None:
    """Return a padding mask as booleans, True to ignore; a float mask ignores where it is (nearly) minus infinity."""
    if padding is None or padding.dtype == torch.bool:
        return padding
    if not padding.is_floating_point():
        raise TypeError(f"{CALLER}: key_padding_mask must be boolean (True to ignore) or float; got {padding.dtype}.")
    return padding <= masked_bias(padding.dtype)


def as_batch(padding: Tensor, batched: bool) -> Tensor:
    return padding if batched else padding[None]


def by_head(attn_mask: Tensor | None, query: Tensor, heads: int, m: int) -> Tensor | None:
    """Return the mask as (n, m), or as (batch, heads, n, m) if it has one matrix per head."""
    if attn_mask is None:
        return None
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"{CALLER}: attn_mask must be boolean (True to ignore) or float; got {attn_mask.dtype}.")
    checks.dense(CALLER, "attn_mask", attn_mask)
    checks.one_device(CALLER, "query", query, attn_mask=attn_mask)
    batch, n = query.shape[:2]
    if attn_mask.dim() not in (2, 3):
        raise ValueError(f"{CALLER}: attn_mask must be (n, m) or (batch·heads, n, m); got {tuple(attn_mask.shape)}.")
    if attn_mask.dim() == 3 and attn_mask.shape[0] != batch * heads:
        raise ValueError(
            f"{CALLER}: a 3-axis attn_mask must be (batch·heads, n, m), with batch·heads = {batch * heads}; "
            f"got {tuple(attn_mask.shape)}."
        )
    shape = torch.Size((batch * heads, n, m)[-attn_mask.dim() :])
    checks.broadcasts(CALLER, "attn_mask", attn_mask, shape, "(n, m) or (batch·heads, n, m)")
    attn_mask = attn_mask if attn_mask.shape[-1] == m else attn_mask.expand(*attn_mask.shape[:-1], m)
    return attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, heads))


def merge_masks(attn_mask: Tensor | None, key_padding: Tensor | None, extra: int, batched: bool) -> Tensor | None:
    """Merge both masks into one as SDPA takes it: boolean, True to attend, or a float bias."""
    merged = None
    if attn_mask is not None:
        allowed = attn_mask.dtype == torch.bool
        merged = F.pad(~attn_mask if allowed else attn_mask, (0, extra), value=True if allowed else 0.0)
    if key_padding is None or key_padding.dtype == torch.bool:
        return merged
    bias = F.pad(as_batch(key_padding, batched), (0, extra))[:, None, None, :]
    if merged is None:
        return bias
    return bias.masked_fill(~merged, -torch.inf) if merged.dtype == torch.bool else merged + bias


def zero_masked_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    queries: Tensor | None,
    keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Set tokens (batch, n, dim) that are masked in every head to zero.

    Otherwise NaN in them would reach the gradients of the projections. A tensor that is both query and key is set to
    zero where it is masked as both.
    """
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else ~as_ignored(mask)
        combined = combine(Masks(None, allowed, *(side if side is None else side[:, None] for side in (queries, keys))))
        # (…, n) and (…, m), to which a mask per head gave a head axis
        queries, keys = (side if side is None or side.dim() < 3 else side.any(1) for side in combined[2:])
    keys = None if keys is None else keys[..., : key.shape[1]]
    if query is key or query is value:
        queries = None if queries is None or keys is None else queries | keys
    new_query = zero_masked(query, queries)
    new_key = new_query if key is query else zero_masked(key, keys)
    return new_query, new_key, new_query if value is query else new_key if value is key else zero_masked(value, keys)
