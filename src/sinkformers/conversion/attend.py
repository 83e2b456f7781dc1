"""The one place where converted modules attend: settings read, watchers told, a single query warned of."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers.attention import attention_with_weights, sinkhorn_attention
from sinkformers.conversion.settings import Settings, is_softmax, relaxation

WATCHER = "_sinkhorn_watcher"
_WARNED = "_sinkhorn_warned"


def attend(
    module: nn.Module,
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output, and weights where asked for, of heads (batch, heads, n, d); key and value may have fewer heads."""
    if query.shape[-2] == 1 and key.shape[-2] > 1 and not is_softmax(settings):
        _warn_of_one_query(module)
    options: dict[str, Any] = {
        "scale": scale,
        "n_iters": settings.n_iters,
        "tau": relaxation(module, settings),
        "query_mask": query_mask,
        "key_mask": key_mask,
    }
    grouped = query.dim() > 2 and key.shape[:-2] != query.shape[:-2]
    watcher = module.__dict__.get(WATCHER)
    if need_weights or watcher is not None:
        key, value = (_spread(x, query) for x in (key, value)) if grouped else (key, value)
        if watcher is not None:
            with torch.no_grad():
                weights = attention_with_weights(query, key, value, attn_mask, **options)[1]
                watcher.see(weights, attn_mask, query_mask, key_mask)
        grouped = False
    if need_weights:
        return attention_with_weights(query, key, value, attn_mask, dropout_p, **options)
    return sinkhorn_attention(query, key, value, attn_mask, dropout_p, enable_gqa=grouped, **options), None


def of_self_attention(mask: Tensor | None, query: Tensor, key: Tensor) -> dict[str, Tensor | None]:
    """A mask written for SoftMax self-attention, (…, n, m), as the masks of `attend`.

    Such masks speak of keys only. A token that nobody may look at is padding, and must leave as a query too, since its
    row would stay in the column sums. A boolean mask whose rows are one row expanded is passed on as that row.
    """
    if mask is None:
        return {}
    square, n = query.shape[-2] == key.shape[-2], query.shape[-2]
    if mask.dtype == torch.bool and (mask.shape[-2] == 1 or mask.stride(-2) == 0) and n > 1:
        keys = mask[..., 0, :]
        return {"query_mask": keys if square else None, "key_mask": keys}
    seen = mask if mask.dtype == torch.bool else mask.detach() > torch.finfo(mask.dtype).min / 2
    return {"attn_mask": mask, "query_mask": seen.any(-2) if square and mask.shape[-1] > 1 else None}


def _spread(tokens: Tensor, query: Tensor) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    return tokens.repeat_interleave(query.shape[-3] // tokens.shape[-3], -3)


def _warn_of_one_query(module: nn.Module) -> None:
    if module.__dict__.get(_WARNED):
        return
    module.__dict__[_WARNED] = True
    warnings.warn(
        f"sinkformers: {type(module).__name__} attends with a single query. A doubly stochastic matrix of one row is "
        "uniform, so from 3 iterations on this is mean pooling, and its queries and keys get no gradient. Leave the "
        "module out with `select`.",
        stacklevel=3,
    )
