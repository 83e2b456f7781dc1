"""SoftMax attention: torch's own function, at its own price, with our masks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.arguments import repeat_groups, triangle
from sinkformers.attention.masks import Masks, centred, combine, zero_masked
from sinkformers.core.arguments import with_rank
from sinkformers.core.problem import working_dtype
from sinkformers.core.registration import explain_second_derivative


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
    l2: bool,
) -> Tensor:
    """torch's own SoftMax attention, at its own price, with masked tokens set to zero."""
    dims, dtype = query.dim(), query.dtype
    if l2:  # half precision would round |k|², which is larger than the scores it goes into
        query, key, value = (x.to(working_dtype(dtype)) for x in (query, key, value))
    if masks or l2:
        if is_causal:
            masks, is_causal = masks.with_entries(with_rank(triangle(query, key), dims)), False
        query, key, value = repeat_groups(query, key, value, enable_gqa)
        enable_gqa = False
    combined = combine(masks)
    if l2:
        query, key = centred(query, key, combined.keys)
    query, key, value = (
        zero_masked(query, combined.queries),
        zero_masked(key, combined.keys),
        zero_masked(value, combined.keys),
    )
    # Rows of masked queries are dropped from the output; in the mask they would only make it a matrix.
    visible = combined if masks.queries is None else combine(masks.with_queries(None))
    attn_mask = visible.entries
    if attn_mask is not None and visible.queries is not None:
        # An empty row may attend everywhere: its output is dropped, and no kernel meets an empty row.
        attn_mask = attn_mask | ~visible.queries[..., None]
    bias = None if combined.bias is None else _narrowed(combined.bias, visible.entries, query.dtype)
    width = value.shape[-1]
    if l2:  # one more feature instead of a bias: the fused kernels have no gradient for the latter
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
        key = torch.cat([key, -0.5 * key.square().sum(-1, keepdim=True)], -1)
        value = F.pad(value, (0, 1))  # they need all tokens equally wide
    if bias is not None:
        attn_mask = bias if attn_mask is None else bias.masked_fill(~attn_mask, -torch.inf)
    padded = max(0, 4 - dims)  # the fused kernels take (batch, heads, n, d)
    lift = (None,) * padded + (...,)
    query, key, value = query[lift], key[lift], value[lift]
    if attn_mask is not None:
        attn_mask = attn_mask[lift]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    explain_second_derivative(out)
    return zero_masked(out[(0,) * padded][..., :width], combined.queries).to(dtype)


def _narrowed(bias: Tensor, entries: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A bias in the dtype of the tokens; a narrower one may not hold it, so each row is first shifted to maximum 0."""
    if torch.finfo(dtype).max < torch.finfo(bias.dtype).max:
        top = bias.detach() if entries is None else bias.detach().masked_fill(~entries, -torch.inf)
        top = top.amax(-1, keepdim=True)
        bias = bias - top.masked_fill(top == -torch.inf, 0.0)
    return bias.to(dtype)
