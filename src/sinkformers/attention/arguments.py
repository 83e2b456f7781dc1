"""Check the tokens, masks and settings of an attention call, and give them one shape."""

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from sinkformers.attention.masks import Masks
from sinkformers.attention.one_way import refuse_one_way
from sinkformers.core import checks
from sinkformers.core.arguments import with_rank
from sinkformers.core.limit import MOST_PRODUCTS
from sinkformers.core.modes import autocasts

CALLER = "sinkhorn_attention"
NO_MASKS = Masks(None, None, None, None)


def check_tokens(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    for name, tokens in (("query", query), ("key", key), ("value", value)):
        checks.tensor(CALLER, name, tokens, min_dim=2)
    if not query.device == key.device == value.device:
        checks.one_device(CALLER, "query", query, key=key, value=value)
    if autocasts(query.device):
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x if x.dtype == torch.float64 else x.to(low) for x in (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"{CALLER}: query, key and value must have one dtype; got {query.dtype}, {key.dtype} and {value.dtype}. "
            "Convert two of them."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{CALLER}: query (…, n, d) and key (…, m, d) must have the same d; got {tuple(query.shape)} and "
            f"{tuple(key.shape)}."
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"{CALLER}: key (…, m, d) and value (…, m, e) must have the same m; got {tuple(key.shape)} and "
            f"{tuple(value.shape)}."
        )
    if enable_gqa:
        _check_groups(query, key, value)
        return query, key, value
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return query, key, value
    try:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{CALLER}: the leading axes of query, key and value must broadcast; got {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}. For grouped heads pass enable_gqa=True."
        ) from None
    return tuple(x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))  # pyright: ignore[reportReturnType]


def are_plain(query: Any, key: Any, value: Any) -> bool:
    """Whether these are tokens in which there is nothing to check: dense tensors of one shape, dtype and device.

    False in a traced call, where comparing sizes would become a condition of the graph.
    """
    if torch.compiler.is_compiling() or not type(query) is type(key) is type(value) is Tensor:
        return False
    dtype, device, strided = query.dtype, query.device, torch.strided
    if query.is_nested or key.is_nested or value.is_nested or dtype not in checks.DTYPES or autocasts(device):
        return False
    shape = query.shape
    return (
        key.dtype == dtype == value.dtype
        and key.device == device == value.device
        and query.layout is strided
        and key.layout is strided
        and value.layout is strided
        and key.shape == shape == value.shape
        and len(shape) >= 2
        and 0 not in shape
    )


def check_scale(scale: float | None, query: Tensor) -> float:
    return 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else checks.number(CALLER, "scale", scale)


def _check_groups(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
    if min(x.dim() for x in (query, key, value)) < 3:
        raise ValueError(f"{CALLER}: enable_gqa=True needs a head axis, (…, heads, n, d); {shapes}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"{CALLER}: with enable_gqa=True the axes before the heads must be equal; {shapes}")
    if any(x.shape[-3] == 0 or query.shape[-3] % x.shape[-3] for x in (key, value)):
        raise ValueError(
            f"{CALLER}: with enable_gqa=True the query's heads must be a multiple of those of key and value; {shapes}"
        )


def repeat_groups(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Key and value heads repeated for the query heads that share them."""
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    return query, key, value


class Stop(NamedTuple):
    """When the search for the limit ends."""

    tol: float
    max_iters: int


def check_stop(n_iters: float, gradient: Any, tol: Any, max_iters: Any) -> Stop | None:
    """When to stop at `n_iters=math.inf`; None for a finite number."""
    if gradient is not None:
        checks.one_of(CALLER, "gradient", gradient, ("unrolled", "implicit"))
    tol = checks.limit_tolerance(CALLER, n_iters, tol)
    if n_iters != math.inf:
        if max_iters is not None:
            raise ValueError(
                f"{CALLER}: max_iters goes with n_iters=math.inf; got max_iters={max_iters!r} and n_iters={n_iters}. "
                "Leave one of them out."
            )
        return None
    if gradient == "unrolled":
        raise ValueError(
            f'{CALLER}: gradient="unrolled" is that of a finite number of steps; got n_iters=math.inf. Leave it out, '
            'or pass "implicit", the gradient of the limit.'
        )
    return Stop(tol, MOST_PRODUCTS if max_iters is None else checks.most_iterations(CALLER, max_iters))


def tau_is_zero(tau: Any) -> bool:
    """Whether `tau` is the number 0, where attention is SoftMax whatever the steps."""
    return not isinstance(tau, Tensor | str | bool) and tau == 0


def check_implicit(n_iters: float) -> None:
    if n_iters < 3 or n_iters % 2 == 0:
        raise ValueError(
            f'{CALLER}: gradient="implicit" needs an odd n_iters ≥ 3, so that the weights end on rows near the limit; '
            f'got {n_iters}. gradient="unrolled" takes any.'
        )


def check_causal(attn_mask: Tensor | None) -> None:
    if attn_mask is not None:
        raise ValueError(f"{CALLER}: pass attn_mask or is_causal=True, not both; put the triangle into attn_mask.")


def check_gradient_in_order(gradient: str | None) -> None:
    if gradient == "implicit":
        raise ValueError(
            f'{CALLER}: causal attention has the gradient of the steps taken, "unrolled"; got gradient="implicit", '
            "that of the limit, which rows normalised in order do not have."
        )


def refuse_causal(caller: str) -> NoReturn:
    raise NotImplementedError(
        f"{caller}: is_causal=True is supported with n_iters=1 (SoftMax) only. Plain Sinkhorn under a triangular mask "
        "leaks and degenerates: a key's column sum runs over later queries, so earlier outputs would see the future, "
        'and the only doubly stochastic triangular matrix is the identity. With causal="streaming" rows are normalised '
        "in order instead."
    )


def check_order(
    attn_mask: Tensor | None, masks: Masks, n_iters: float, tau: float | Tensor, allow_one_way_mask: bool
) -> None:
    """Refuse a mask that orders the tokens, unless the weights are SoftMax; a tensor `tau` is not read."""
    if allow_one_way_mask or n_iters == 1 or (not isinstance(tau, Tensor) and tau == 0):
        return
    remedy = (
        'Pass causal="streaming", which normalises rows in order; take n_iters=1 or tau=0, which is SoftMax; or pass '
        "allow_one_way_mask=True if that is meant."
    )
    refuse_one_way(CALLER, attn_mask, masks.queries, masks.keys, remedy=remedy)


def check_prefix_mask(*, given: bool) -> None:
    """Refuse the prefix definition without a mask that says which tokens each query sees."""
    if not given:
        raise ValueError(
            f'{CALLER}: causal="prefix" needs is_causal=True or an attn_mask, which says what tokens each query sees; '
            "got neither. Under no mask every query would see all tokens, and later ones with them."
        )


def triangle(query: Tensor, key: Tensor) -> Tensor:
    return query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()


def check_masks(attn_mask: Any, query_mask: Any, key_mask: Any, query: Tensor, m: int) -> Masks:
    """All masks with the rank of the scores (…, n, m) of `query` (…, n, d), or one less."""
    if attn_mask is None and query_mask is None and key_mask is None:
        return NO_MASKS
    checks.one_device(CALLER, "query", query, attn_mask=attn_mask, query_mask=query_mask, key_mask=key_mask)
    tokens, shape = query.shape[:-1], torch.Size((*query.shape[:-1], m))
    bias = entries = None
    if attn_mask is not None:
        if isinstance(attn_mask, Tensor) and (attn_mask.is_floating_point() or attn_mask.is_complex()):
            checks.floating(CALLER, "attn_mask", attn_mask)
            checks.broadcasts(CALLER, "attn_mask", attn_mask, shape, "(…, n, m)")
            bias = with_rank(attn_mask, len(shape))
        else:
            checks.mask(CALLER, "attn_mask", attn_mask, shape, "(…, n, m)")
            entries = with_rank(attn_mask, len(shape))
    queries = _check_token_mask("query_mask", query_mask, tokens)
    keys = _check_token_mask("key_mask", key_mask, torch.Size((*tokens[:-1], m)))
    return Masks(bias, entries, queries, keys)


def _check_token_mask(name: str, mask: Any, shape: torch.Size) -> Tensor | None:
    """A mask (batch, n), to which a head axis is added where the tokens (batch, heads, n) have one."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.is_nested or not 2 <= mask.dim() < len(shape):
        checks.mask(CALLER, name, mask, shape, "the tokens")
        return with_rank(mask, len(shape))
    checks.dense(CALLER, name, mask)
    full = mask.reshape(*mask.shape[:-1], *(1,) * (len(shape) - mask.dim()), mask.shape[-1])
    checks.mask(CALLER, name, full, shape, "the tokens", given=mask.shape)
    return full
