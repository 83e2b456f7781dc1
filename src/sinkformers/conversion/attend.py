"""The attention of converted modules: reads settings, informs watchers, and refuses or warns of unsuitable calls."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers.attention import CacheLayer, attention_with_weights, sinkhorn_attention
from sinkformers.attention.functional import attention_with_evidence
from sinkformers.attention.mask_values import hides_nothing
from sinkformers.attention.one_way import refuse_one_way
from sinkformers.attention.with_weights import attention_scores
from sinkformers.conversion.in_order import WATCHER, attend_in_order, masked_scores
from sinkformers.conversion.settings import Settings, is_softmax, tau_of
from sinkformers.core import LimitInfo, causal_sinkhorn, checks, sinkhorn, sinkhorn_limit
from sinkformers.core.limit import HasEvidence
from sinkformers.core.ranges import masked_bias
from sinkformers.distributed import refuse_in_parallel

WARNED = "_sinkhorn_warned"  # set on a module after its warning, which is given once
REMEDY = (
    'Convert the module with causal="streaming" and a `select` that matches it, which normalises rows in order. Or '
    "leave it out with `select`, or convert it with allow_one_way_mask=True if that is meant."
)


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
    enable_gqa: bool = False,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    need_weights: bool = False,
    allow_one_way_mask: bool = False,
    is_causal: bool = False,
    cache: CacheLayer | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the weights if `need_weights`, of heads (batch, heads, n, d).

    Masks are those of `sinkhorn_attention`; `is_causal` and `cache` are for modules whose settings have `causal`.
    """
    if need_weights or module.__dict__.get(WATCHER) is not None:
        name = type(module).__name__
        refuse_in_parallel(name, "no rank computes all weights. Leave watch_attention and returned weights out.")
    problem: dict[str, Any] = {"scale": scale, "query_mask": query_mask, "key_mask": key_mask}
    if settings.causal is not None:
        order: dict[str, Any] = {"enable_gqa": enable_gqa, "is_causal": is_causal, "cache": cache, **problem}
        order["need_weights"] = need_weights
        return attend_in_order(module, settings, (query, key, value), attn_mask, dropout_p, **order)
    assert not is_causal
    assert cache is None
    _warn_of_single_query(module, settings, query.shape[-2], key.shape[-2])
    if not allow_one_way_mask:
        _refuse_one_way(module, settings, attn_mask, query_mask, key_mask)
    steps: dict[str, Any] = {"n_iters": settings.n_iters, "tau": tau_of(module, settings)}
    options: dict[str, Any] = {**problem, **steps, "allow_one_way_mask": True}
    watcher = module.__dict__.get(WATCHER)
    if enable_gqa and (need_weights or watcher is not None):
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        enable_gqa = False
    if watcher is None and not need_weights:
        return sinkhorn_attention(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, **options), None
    evidence: HasEvidence | None = None
    if need_weights:
        out, returned = attention_with_weights(query, key, value, attn_mask, dropout_p, **options)
    else:
        (out, evidence), returned = attention_with_evidence(query, key, value, attn_mask, dropout_p, **options), None
    if watcher is not None:
        with torch.no_grad():
            scores = attention_scores(query, key, attn_mask, **problem)
            weights, info = _weights(scores, **steps)
            evidence = info if evidence is None else evidence
            watcher.record(weights.to(out.dtype), attn_mask, query_mask, key_mask, evidence, scores=scores)
    return out, returned


def normalise(
    module: nn.Module, settings: Settings, scores: Tensor, mask: Tensor | None, softmax: Tensor | None = None
) -> Tensor:
    """Return the weights for self-attention scores (…, n, m), in place of a model's own call of SoftMax.

    Args:
        mask: boolean (…, n, m), True at valid entries, or None if all are.
        softmax: the weights, if they are SoftMax and known already.
    """
    n, m = scores.shape[-2:]
    refuse_in_parallel(type(module).__name__, "it computes scores of this rank's tokens alone by itself.")
    if settings.causal is not None:
        return _normalise_in_order(module, settings, scores, mask, softmax)
    _warn_of_single_query(module, settings, n, m)
    _refuse_one_way(module, settings, mask)
    if n == m and mask is not None:
        mask = mask & mask.any(-2)[..., None]
    steps: dict[str, Any] = {"n_iters": settings.n_iters, "tau": tau_of(module, settings), "mask": mask}
    weights = sinkhorn(scores, **steps) if softmax is None else softmax
    watcher = module.__dict__.get(WATCHER)
    if watcher is not None:
        info = None
        if settings.n_iters == math.inf:
            with torch.no_grad():
                info = _weights(scores, **steps)[1]
        valid = None if mask is None else _four_axes(mask)
        seen = _four_axes(masked_scores(scores.detach(), mask))
        watcher.record(_four_axes(weights.detach()), valid, None, None, info, scores=seen)
    return weights


def _normalise_in_order(
    module: nn.Module, settings: Settings, scores: Tensor, mask: Tensor | None, softmax: Tensor | None
) -> Tensor:
    refuse_unknown_cache(module, settings, *scores.shape[-2:])
    steps: dict[str, Any] = {"n_iters": settings.n_iters, "tau": tau_of(module, settings)}
    n, m = scores.shape[-2:]
    mask = scores.new_ones(n, m, dtype=torch.bool) if mask is None else mask
    mask = mask & mask.any(-2)[..., None] if n == m else mask
    weights = causal_sinkhorn(scores, mask=mask, **steps) if softmax is None else softmax
    watcher = module.__dict__.get(WATCHER)
    if watcher is not None:
        seen = _four_axes(masked_scores(scores.detach(), mask))
        valid = _four_axes(mask.expand(scores.shape))
        watcher.record(_four_axes(weights.detach()), valid, None, None, in_order=True, scores=seen)
    return weights


def refuse_unknown_cache(module: nn.Module, settings: Settings, n: int, m: int) -> None:
    """Raise if a causal module has fewer queries than keys, and what the keys have received is not known."""
    if n != m and not is_softmax(settings):
        raise NotImplementedError(
            f"sinkformers: {type(module).__name__} normalises rows in order, and was called with {n} queries and {m} "
            "keys. What the keys have received from earlier queries is not known here: pass all tokens at once, "
            "without a cache of keys and values (use_cache=False, in many libraries)."
        )


def _four_axes(matrices: Tensor) -> Tensor:
    """Return matrices (…, n, m) as (batch, heads, n, m), with one head if they have three axes."""
    return matrices[:, None] if matrices.dim() == 3 else matrices.flatten(0, -4)


def _weights(
    scores: Tensor, *, n_iters: int | float, tau: float | Tensor, mask: Tensor | None = None
) -> tuple[Tensor, LimitInfo | None]:
    """Return the weights, and how each matrix converged where `n_iters` is `math.inf`; nothing is warned of."""
    if n_iters != math.inf:
        return sinkhorn(scores, n_iters=n_iters, tau=tau, mask=mask), None
    tol = checks.limit_tolerance("sinkhorn", n_iters, None)
    return sinkhorn_limit(scores, tau=tau, tol=tol, mask=mask, return_info=True)


def self_attention_masks(
    mask: Tensor | None, query: Tensor, key: Tensor, *, all_visible: bool = False
) -> dict[str, Tensor | None]:
    """Return the mask arguments of `attend` for a mask (…, n, m) that was made for SoftMax self-attention.

    Such masks hide keys only. A token that no query may attend to is padding. It must be masked as a query too, because
    its row would otherwise count in the column sums. A boolean mask whose rows are all equal is returned as that row,
    since the kernels skip masked tokens, but not masked entries.

    Args:
        all_visible: the mask is known to be a bias that hides nothing.
    """
    if mask is None:
        return {}
    mask = mask[(None,) * (query.dim() - mask.dim()) + (...,)]
    square, n = query.shape[-2] == key.shape[-2], query.shape[-2]
    if mask.dtype == torch.bool and n > 1 and _has_equal_rows(mask):
        keys = mask[..., 0, :]
        return {"query_mask": keys if square else None, "key_mask": keys}
    all_visible = all_visible or (mask.is_floating_point() and hides_nothing(mask))
    if all_visible or not square or mask.shape[-1] == 1:
        return {"attn_mask": mask, "query_mask": None}
    return {"attn_mask": mask, "query_mask": allowed(mask).any(-2)}


def allowed(mask: Tensor) -> Tensor:
    """Return where a mask, a bias or scores allow attention; the lowest finite numbers count as minus infinity."""
    return mask if mask.dtype == torch.bool else mask.detach() > masked_bias(mask.dtype)


def _warn_of_single_query(module: nn.Module, settings: Settings, n: int, m: int) -> None:
    """Warn, once per module, if there is a single query."""
    if n == 1 and m > 1 and not is_softmax(settings) and not module.__dict__.get(WARNED):
        module.__dict__[WARNED] = True
        warnings.warn(
            f"sinkformers: {type(module).__name__} attends with a single query. A doubly stochastic matrix of one row "
            "is uniform, so from 3 iterations on this is mean pooling, and its queries and keys get no gradient. Leave "
            "the module out with `select`.",
            stacklevel=3,
        )


def _refuse_one_way(
    module: nn.Module,
    settings: Settings,
    mask: Tensor | None,
    queries: Tensor | None = None,
    keys: Tensor | None = None,
) -> None:
    """Raise if a mask orders the tokens, as a causal one does."""
    if not settings.allow_one_way_mask and not is_softmax(settings):
        refuse_one_way(f"sinkformers: {type(module).__name__}", mask, queries, keys, remedy=REMEDY)


def _has_equal_rows(mask: Tensor) -> bool:
    """Return whether all rows of a boolean mask (…, n or 1, m) are equal; while tracing, only its layout is known."""
    if mask.shape[-2] == 1 or mask.stride(-2) == 0:
        return True
    return not torch.compiler.is_compiling() and bool((mask == mask[..., :1, :]).all())
