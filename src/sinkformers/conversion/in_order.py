"""The attention of converted modules whose rows are normalised in order: causal ones, and those of decoders."""

from typing import Any

import torch
from torch import Tensor, nn

from sinkformers.attention import CacheLayer, sinkhorn_attention
from sinkformers.attention.causal import ColumnSums
from sinkformers.conversion.settings import Settings, tau_of

WATCHER = "_sinkhorn_watcher"


def attend_in_order(
    module: nn.Module,
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    need_weights: bool = False,
    is_causal: bool = False,
    cache: CacheLayer | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the weights if `need_weights`, of heads (batch, heads, n, d).

    Arguments are those of `sinkhorn_attention`. Masks may order the tokens.
    """
    options: dict[str, Any] = {"scale": scale, "query_mask": query_mask, "key_mask": key_mask, "is_causal": is_causal}
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
            mask = attn_mask if not is_causal else torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
            watcher.record(weights, mask, query_mask, key_mask, in_order=True)
    if not need_weights:
        return sinkhorn_attention(query, key, value, attn_mask, dropout_p, cache=cache, **options), None
    weights, sums = _weights(query, keys, attn_mask, dropout_p, cache, **options)
    if cache is not None:
        cache.store(keys, values, sums.received, sums.expected)
    return weights @ values, weights


def _weights(
    query: Tensor, keys: Tensor, attn_mask: Tensor | None, dropout_p: float, cache: CacheLayer | None, **options: Any
) -> tuple[Tensor, ColumnSums]:
    """Return the weights (…, n, m), which are the output for values that form an identity matrix, and the new sums."""
    m, sums = keys.shape[-2], ColumnSums(grows=options["is_causal"])
    if cache is not None:
        sums.received, sums.expected = cache.received, cache.expected
    identity = torch.eye(m, dtype=query.dtype, device=query.device).expand(*keys.shape[:-2], m, m)
    if options["is_causal"] and query.shape[-2] != m and cache is None:
        return sinkhorn_attention(query, keys, identity, attn_mask, dropout_p, **options), sums  # raises the reason
    return sinkhorn_attention(query, keys, identity, attn_mask, dropout_p, cache=sums, **options), sums
