"""The attention of converted modules whose rows are normalised in order: causal ones, and those of decoders."""

from typing import Any

import torch
from torch import Tensor, nn

from sinkformers.attention import CacheLayer, sinkhorn_attention
from sinkformers.attention.causal import ColumnSums
from sinkformers.attention.masks import zero_masked
from sinkformers.attention.with_weights import attention_scores
from sinkformers.conversion.settings import Settings, tau_of

WATCHER = "_sinkhorn_watcher"


def attend_in_order(
    module: nn.Module,
    settings: Settings,
    tokens: tuple[Tensor, Tensor, Tensor],
    attn_mask: Tensor | None,
    dropout_p: float,
    *,
    enable_gqa: bool,
    need_weights: bool,
    cache: CacheLayer | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the weights if `need_weights`, of query, key and value (batch, heads, n or m, d).

    The other arguments are those of `sinkhorn_attention`. Masks may order the tokens.
    """
    query, key, value = tokens
    options |= {"n_iters": settings.n_iters, "tau": tau_of(module, settings), "causal": settings.causal}
    watcher = module.__dict__.get(WATCHER)
    if watcher is None and not need_weights:
        options |= {"enable_gqa": enable_gqa, "cache": cache}
        return sinkhorn_attention(query, key, value, attn_mask, dropout_p, **options), None
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    keys, values = (key, value) if cache is None else cache.extended("sinkhorn_attention", key, value)
    if watcher is not None:
        with torch.no_grad():
            weights, _ = _weights(query, keys, attn_mask, 0.0, cache, **options)
            n, m = weights.shape[-2:]
            if options["is_causal"]:
                mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
            else:
                mask = attn_mask
            problem: dict[str, Any] = {name: options[name] for name in ("scale", "query_mask", "key_mask")}
            scores = attention_scores(query, keys, attn_mask, **problem) if watcher.keep_scores else None
            scores = scores if scores is None or not options["is_causal"] else masked_scores(scores, mask)
            watcher.record(weights, mask, options["query_mask"], options["key_mask"], in_order=True, scores=scores)
    if not need_weights:
        return sinkhorn_attention(query, key, value, attn_mask, dropout_p, cache=cache, **options), None
    weights, sums = _weights(query, keys, attn_mask, dropout_p, cache, **options)
    if cache is not None:
        cache.store(keys, values, sums.received, sums.expected)
        cache.tau = sums.tau
    return weights @ zero_masked(values, weights.detach().any(-2)), weights  # what is not seen may hold anything


def masked_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return scores (…, n, m) with minus infinity where a boolean mask is False."""
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _weights(
    query: Tensor, keys: Tensor, attn_mask: Tensor | None, dropout_p: float, cache: CacheLayer | None, **options: Any
) -> tuple[Tensor, ColumnSums]:
    """Return the weights (…, n, m), which are the output for values that form an identity matrix, and the new sums."""
    m, sums = keys.shape[-2], ColumnSums(grows=options["is_causal"])
    if cache is not None:
        sums.received, sums.expected, sums.tau = cache.received, cache.expected, cache.tau
    identity = torch.eye(m, dtype=query.dtype, device=query.device).expand(*keys.shape[:-2], m, m)
    if options["is_causal"] and query.shape[-2] != m and cache is None:
        return sinkhorn_attention(query, keys, identity, attn_mask, dropout_p, **options), sums  # raises the reason
    return sinkhorn_attention(query, keys, identity, attn_mask, dropout_p, cache=sums, **options), sums
