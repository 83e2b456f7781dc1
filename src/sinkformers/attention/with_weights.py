"""Attention that computes its scores and weights as matrices, for those who ask to see them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.arguments import (
    CALLER,
    check_masks,
    check_order,
    check_prefix_mask,
    check_scale,
    check_tokens,
)
from sinkformers.attention.call import attention_problem
from sinkformers.attention.masks import CombinedMasks, combine, zero_masked
from sinkformers.core.causal import causal_iterations, causal_sinkhorn
from sinkformers.core.modes import without_autocast
from sinkformers.core.problem import working_dtype
from sinkformers.core.sinkhorn import sinkhorn
from sinkformers.distributed import refuse_in_parallel


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    n_iters: int | float = 3,
    tau: float | Tensor = 1.0,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    allow_one_way_mask: bool = False,
    causal: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`sinkhorn_attention` that also returns the weights (…, n, m), after dropout."""
    refuse_in_parallel("Attention that returns its weights", "no rank computes them all. Pass need_weights=False.")
    query, key, value = check_tokens(query, key, value, False)
    masks = check_masks(attn_mask, query_mask, key_mask, query, key.shape[-2])
    if causal == "prefix":
        check_prefix_mask(given=attn_mask is not None)
    if causal is None:
        check_order(attn_mask, masks, n_iters, tau, allow_one_way_mask)
    scale = check_scale(scale, query)
    combined, dtype = combine(masks), working_dtype(query.dtype)
    with without_autocast(query.device):
        if causal is None:
            weights = sinkhorn(_scores(query, key, combined, scale), n_iters=n_iters, tau=tau)
        else:
            weights = _in_order(query, key, combined, scale, causal_iterations(CALLER, n_iters), tau, causal)
        weights = F.dropout(weights, dropout_p)
        out = zero_masked(weights @ zero_masked(value.to(dtype), combined.keys), combined.queries)
    return out.to(query.dtype), weights.to(query.dtype)


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The scores (…, n, m) that `sinkhorn_attention` normalises, in the dtype of its steps; −inf where masked."""
    query, key, _ = check_tokens(query, key, key, False)
    masks = check_masks(attn_mask, query_mask, key_mask, query, key.shape[-2])
    with without_autocast(query.device):
        return _scores(query, key, combine(masks), check_scale(scale, query))


def _in_order(
    query: Tensor,
    key: Tensor,
    masks: CombinedMasks,
    scale: float,
    n_iters: int,
    tau: float | Tensor,
    definition: str,
) -> Tensor:
    """The weights of causal attention. For `"prefix"` the mask says which tokens a prefix has; all scores are read."""
    valid = query.new_ones(1, 1, dtype=torch.bool) if masks.entries is None else masks.entries
    masks = masks._replace(entries=None) if definition == "prefix" else masks
    scores = _scores(query, key, masks, scale)
    return causal_sinkhorn(scores, n_iters=n_iters, tau=tau, mask=valid, definition=definition)


def _scores(query: Tensor, key: Tensor, masks: CombinedMasks, scale: float) -> Tensor:
    dtype = working_dtype(query.dtype)
    q, k = zero_masked(query.to(dtype), masks.queries), zero_masked(key.to(dtype), masks.keys)
    return attention_problem(q, k, masks, scale, False).scores
