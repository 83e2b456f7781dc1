"""Plan a call of causal attention: with a cache or without, by either definition."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.arguments import CALLER, check_masks, check_prefix_mask, repeat_groups
from sinkformers.attention.call import AttentionCall
from sinkformers.attention.causal.cache import CacheLayer, ColumnSums
from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.attention.causal.operator import BACKENDS, attend_causal
from sinkformers.attention.causal.rows import sums_before
from sinkformers.attention.dropout import dropout_mask_operator
from sinkformers.attention.masks import Masks, zero_masked
from sinkformers.attention.plan import Plan, no_output
from sinkformers.attention.softmax import softmax_attention
from sinkformers.core import checks
from sinkformers.core.arguments import relaxation_tensor, with_rank
from sinkformers.core.backend import Backend
from sinkformers.core.causal import DEFINITIONS, causal_iterations, prefix_weights
from sinkformers.core.definition import Definition
from sinkformers.core.modes import without_autocast


class Settings(NamedTuple):
    """What a call of causal attention has beside its tokens and masks; all checked but those named otherwise."""

    dropout_p: float
    is_causal: bool
    scale: float
    enable_gqa: bool
    n_iters: int | float  # not checked to be odd
    tau: float | Tensor
    l2: bool
    backend: str  # not checked
    causal: Any  # not checked
    cache: Any  # not checked


def is_softmax(n_iters: float, tau: float | Tensor) -> bool:
    return isinstance(tau, float) and (n_iters == 1 or tau == 0)


def plan_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    settings: Settings,
) -> Plan:
    """Plan a call whose tokens are checked, and that has `causal`, a cache, or `is_causal` with column steps."""
    n_iters = causal_iterations(CALLER, settings.n_iters)
    causal, cache, is_causal = settings.causal, settings.cache, settings.is_causal
    if causal is not None:
        checks.one_of(CALLER, "causal", causal, DEFINITIONS)
    if cache is not None and not isinstance(cache, CacheLayer):
        raise TypeError(
            f"{CALLER}: cache must be one layer of a SinkhornCache, cache[0] for instance; got {type(cache).__name__}."
        )
    _check_triangle(query, key, attn_mask, settings)
    if causal == "prefix" and cache is not None:
        raise NotImplementedError(
            f'{CALLER}: causal="prefix" recomputes whole prefixes and has no cache; causal="streaming" has one.'
        )
    if cache is not None:
        key, value = cache.extended(CALLER, key, value)
    n, m, kept = query.shape[-2], key.shape[-2], (key, value)
    masks = check_masks(attn_mask, query_mask, key_mask, query, m)
    if query.shape[-1] == 0:  # a feature that is zero gives the same scores
        query, key = F.pad(query, (0, 1)), F.pad(key, (0, 1))
    empty = 0 in query.shape or 0 in value.shape
    softmax = is_softmax(n_iters, settings.tau) and settings.backend == "auto"
    if softmax and not empty:
        if is_causal and n != m:
            is_causal = False
            if n > 1:  # a single query, the last, sees all keys
                masks = masks.with_entries(with_rank(_triangle(query, m), query.dim()))
        options = (settings.dropout_p, is_causal, settings.scale, settings.enable_gqa, settings.l2)
        return Plan("sdpa", _softmax, (cache, kept, query, key, value, masks, *options))
    if softmax:  # an empty chunk of it has no column sums either
        n_iters = 1
    query, key, value = repeat_groups(query, key, value, settings.enable_gqa)
    by_head = relaxation_tensor(settings.tau, query)
    if causal == "prefix":
        return _plan_prefix(query, key, value, masks, by_head, n_iters, settings, empty)
    received = expected = None
    if cache is not None:
        received, expected = cache.sums(CALLER, query, m, n_iters // 2, settings.tau)
    call = CausalAttentionCall(
        query, key, value, *masks, by_head, None, None, received, expected, n_iters, settings.scale, settings.l2,
        settings.dropout_p, is_causal, cache is not None, 1,
    )  # fmt: skip
    chosen = BACKENDS.choose(CALLER, settings.backend, call)
    if empty:
        return Plan(chosen.name, _empty, (call, cache, *kept, settings.tau))
    in_blocks = call.change(block=chosen.rows_per_block(call))
    return Plan(chosen.name, _run, (in_blocks, chosen, cache, *kept), BACKENDS, call)


def _check_triangle(query: Tensor, key: Tensor, attn_mask: Tensor | None, settings: Settings) -> None:
    n, new, cache = query.shape[-2], key.shape[-2], settings.cache
    fits = n <= new if isinstance(cache, ColumnSums) else n == new
    if not settings.is_causal:
        if cache is not None and cache.grows and not fits:
            raise ValueError(
                f"{CALLER}: a cache that grows needs as many queries as new keys; got {n} and {new}. Cross-attention, "
                "whose keys are the same in every call, takes the layer cache.cross(0)."
            )
        return
    if attn_mask is not None:
        raise ValueError(
            f"{CALLER}: pass attn_mask or is_causal=True, not both; put the triangle into attn_mask, and pass "
            'causal="streaming".'
        )
    if not fits or (cache is not None and not cache.grows):
        raise ValueError(
            f"{CALLER}: is_causal=True with more than one normalisation or a cache needs as many queries as new keys; "
            f"got {n} and {new}. For earlier keys pass the cache that holds them; for the cross-attention of a "
            'decoder leave is_causal out and pass causal="streaming", and with a cache the layer cache.cross(0).'
        )


def _triangle(query: Tensor, m: int) -> Tensor:
    """Each query sees the keys up to its own, the last query all."""
    n = query.shape[-2]
    return query.new_ones(n, m, dtype=torch.bool).tril(m - n)


def _softmax(cache: CacheLayer | None, kept: tuple[Tensor, Tensor], *rest: Any) -> Tensor:
    out = softmax_attention(*rest)
    if cache is not None:
        cache.store(*kept, None, None)
    return out


def _run(call: CausalAttentionCall, backend: Backend, cache: CacheLayer | None, key: Tensor, value: Tensor) -> Tensor:
    dtype = call.query.dtype
    if call.dropout_p > 0:  # drawn here, so that planning a call leaves the generator alone
        call = call.change(seed=torch.randint(2**62, (), device="cpu"))
    if backend.composite:
        return backend.forward(call)
    if cache is None:
        return attend_causal.output(call, backend).to(dtype)
    result = attend_causal(call, backend)
    cache.store(key, value, result.received, result.expected)
    return result.out.to(dtype)


def _empty(call: CausalAttentionCall, cache: CacheLayer | None, key: Tensor, value: Tensor, tau: Any) -> Tensor:
    if cache is not None:  # keys without features in their values have received something, which nobody will see
        sums = sums_before(call)
        cache.store(key, value, sums.received, sums.expected.expand(*call.query.shape[:-2], key.shape[-2]))
    return no_output(call.query, call.key, call.value, call.bias, tau)


def _plan_prefix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    tau: Tensor | None,
    n_iters: int,
    settings: Settings,
    empty: bool,
) -> Plan:
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f'{CALLER}: causal="prefix" needs as many queries as keys, which are the same tokens; got '
            f'{query.shape[-2]} and {key.shape[-2]}. causal="streaming" takes any numbers.'
        )
    check_prefix_mask(given=settings.is_causal or masks.bias is not None or masks.entries is not None)
    if settings.backend not in ("auto", "torch"):
        checks.one_of(CALLER, "backend", settings.backend, BACKENDS.names())
        raise NotImplementedError(f'{CALLER}: causal="prefix" is served by backend="torch" or "auto" only.')
    if empty:
        return Plan("torch", no_output, (query, key, value, masks.bias, settings.tau))
    if settings.is_causal:
        masks = masks.with_entries(with_rank(_triangle(query, key.shape[-2]), query.dim()))
    options = (n_iters, settings.scale, settings.l2, settings.dropout_p)
    return Plan("torch", _prefix, (AttentionCall(query, key, value, *masks, tau, None, None, *options, False),))


def _prefix(call: AttentionCall) -> Tensor:
    """Attention with the weights of `causal_sinkhorn(…, definition="prefix")`."""
    dtype = call.query.dtype
    with without_autocast(call.query.device):
        call, masks = call.in_working_dtype().without_masked_tokens()
        # The mask says which tokens a prefix has; scores between them are all read.
        scores = call.change(entries=None).problem(masks._replace(entries=None)).scores
        shape = scores.shape
        valid = scores.new_ones(shape, dtype=torch.bool) if masks.entries is None else masks.entries.expand(shape)
        weights = prefix_weights(scores, valid, call.tau, Definition(call.n_iters))
        if call.dropout_p > 0:
            seed = torch.randint(2**62, (), device="cpu")
            weights = weights * dropout_mask_operator(seed, weights.detach(), call.dropout_p)
        return zero_masked(weights @ call.value, masks.queries).to(dtype)
