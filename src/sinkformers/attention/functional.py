"""`sinkhorn_attention`: attention as users call it."""

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.dropout import kept_operator
from sinkformers.attention.operators import attend
from sinkformers.attention.participants import Masks, centred, combine, silence
from sinkformers.attention.plain import attention_problem
from sinkformers.core import backends, checks
from sinkformers.core.problem import working_dtype
from sinkformers.core.reference import reference_weights
from sinkformers.core.registration import autocasts, without_autocast
from sinkformers.core.sinkhorn import relaxation_tensor, sinkhorn, with_rank

CALLER = "sinkhorn_attention"


def sinkhorn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    n_iters: int = 3,
    tau: float | Tensor = 1.0,
    cost: str = "dot",
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    gradient: str = "unrolled",
    backend: str = "auto",
) -> Tensor:
    """Attention whose weights are normalised by Sinkhorn's algorithm instead of SoftMax.

    The signature and the conventions are those of `F.scaled_dot_product_attention`; at `n_iters=1` it is that function.

    Args:
        query: (…, n, d); key: (…, m, d); value: (…, m, e). With heads, (batch, heads, n, d).
        attn_mask: boolean, `True` takes part, or a float bias added to the scores; broadcasts to (…, n, m). Minus
            infinity means masked, and so does a bias of `finfo(dtype).min / 2` or less.
        dropout_p: drops weights after the last normalisation. Unlike a module, a function knows no training mode.
        is_causal: as in SoftMax attention, for `n_iters=1` only.
        scale: of the dot products; 1/√d by default.
        enable_gqa: query heads share key and value heads, in groups.
        n_iters, tau: as in `sinkhorn`. A tensor `tau` broadcasts to the leading axes: one value a head is (heads,).
        cost: `"dot"`, or `"l2"` for scores −½·scale·|q − k|².
        query_mask, key_mask: boolean (batch, n) and (batch, m), `True` takes part. Where it has fewer axes than the
            tokens, those before the last are the tokens' first. A token out of the game leaves the sums of the other
            side too, which masking a key alone does not do: self-attention passes both.
        gradient: `"unrolled"`, the exact gradient of the steps taken, or `"implicit"`, that of the limit at the weights
            reached (odd `n_iters` ≥ 3).
        backend: `auto`, `torch`, or `reference`, which can be differentiated twice.

    Returns:
        (…, n, e) in the dtype of the query. Queries out of the game give zeros.

    Padding never shows: what stands in tokens out of the game, NaN included, changes no output and no gradient, and
    their own gradients are exact zeros.

    Examples:
        >>> import torch, sinkformers
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind()
        >>> real = torch.arange(10) < torch.tensor([[10], [7]])
        >>> out = sinkformers.sinkhorn_attention(q, k, v, n_iters=5, query_mask=real, key_mask=real)
        >>> out.shape, out[1, :, 7:].abs().max().item()
        (torch.Size([2, 4, 10, 16]), 0.0)
    """
    query, key, value = _check_tokens(query, key, value, enable_gqa)
    heads_lead, n, m = query.shape[:-2], query.shape[-2], key.shape[-2]
    n_iters = checks.iterations(CALLER, n_iters)
    checks.one_of(CALLER, "gradient", gradient, ("unrolled", "implicit"))
    relaxation = checks.relaxation(CALLER, tau, heads_lead, zero=gradient == "unrolled")
    dropout_p = checks.probability(CALLER, "dropout_p", dropout_p)
    checks.one_of(CALLER, "cost", cost, ("dot", "l2"))
    chosen = backends.choose(CALLER, backend, query.device)
    if chosen == "triton":
        _check_triton(query, value)
    softmax = isinstance(relaxation, float) and (n_iters == 1 or relaxation == 0)
    if gradient == "implicit":
        _check_implicit(n_iters, chosen)
    if is_causal:
        _check_causal(attn_mask, n_iters == 1 or softmax)
    scale = _check_scale(scale, query)
    masks = _check_masks(attn_mask, query_mask, key_mask, torch.Size((*heads_lead, n, m)))
    if is_causal and n < m:  # the keys after the last query are seen by none
        key, value, m = key[..., :n, :], value[..., :n, :], n
        masks = masks._replace(keys=None if masks.keys is None else masks.keys[..., :n])
    if softmax and backend == "auto":
        return _softmax_attention(query, key, value, masks, dropout_p, is_causal, scale, enable_gqa, cost == "l2")
    if is_causal:
        masks = masks._replace(entries=with_rank(_triangle(query, key), query.dim()))
    query, key, value = _spread(query, key, value, enable_gqa)
    if n == 0 or m == 0:
        return ((query @ key.mT).softmax(-1) @ value) * (1 - dropout_p)
    seed = torch.randint(2**62, ()) if dropout_p > 0 else None
    by_head = relaxation_tensor(relaxation, query)
    if chosen == "reference":
        return _reference_attention(query, key, value, masks, by_head, seed, n_iters, scale, cost == "l2", dropout_p)
    settings = (n_iters, scale, cost == "l2", dropout_p, gradient == "implicit", chosen)
    return attend(query, key, value, *masks, by_head, seed, *settings)[0]


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    n_iters: int = 3,
    tau: float | Tensor = 1.0,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sinkhorn_attention` for those who want to see the weights (…, n, m): output and weights, after dropout."""
    query, key, value = _check_tokens(query, key, value, False)
    masks = _check_masks(attn_mask, query_mask, key_mask, torch.Size((*query.shape[:-1], key.shape[-2])))
    scale = _check_scale(scale, query)
    dtype = working_dtype(query.dtype)
    with without_autocast(query.device):
        who = combine(masks)
        q, k = silence(query.to(dtype), who.queries), silence(key.to(dtype), who.keys)
        problem = attention_problem(q, k, who, scale, False)
        weights = F.dropout(sinkhorn(problem.scores, n_iters=n_iters, tau=tau), dropout_p)
        out = silence(weights @ silence(value.to(dtype), who.keys), who.queries)
    return out.to(query.dtype), weights.to(query.dtype)


def _softmax_attention(
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
    """torch's own SoftMax attention, at its own price, on tokens whose padding was silenced."""
    dims, dtype = query.dim(), query.dtype
    if l2:  # half precision would round |k|², which is larger than the scores it goes into
        query, key, value = (x.to(working_dtype(dtype)) for x in (query, key, value))
    if masks or l2:
        if is_causal:
            masks, is_causal = masks._replace(entries=with_rank(_triangle(query, key), dims)), False
        query, key, value = _spread(query, key, value, enable_gqa)
        enable_gqa = False
    who = combine(masks)
    if l2:
        query, key = centred(query, key, who.keys)
    query, key, value = silence(query, who.queries), silence(key, who.keys), silence(value, who.keys)
    # Rows of queries out of the game are dropped from the output; in the mask they would only make it a matrix.
    looks = combine(masks._replace(queries=None))
    attn_mask = looks.entries
    if attn_mask is not None and looks.queries is not None:
        # A query with nothing left may look everywhere: its output is dropped, and no kernel meets an empty row.
        attn_mask = attn_mask | ~looks.queries[..., None]
    bias = None if who.bias is None else _narrowed(who.bias, looks.entries, query.dtype)
    width = value.shape[-1]
    if l2:  # one more feature instead of a bias: the fused kernels have no gradient for the latter
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
        key = torch.cat([key, -0.5 * key.square().sum(-1, keepdim=True)], -1)
        value = F.pad(value, (0, 1))  # they want all tokens equally wide
    if bias is not None:
        attn_mask = bias if attn_mask is None else bias.masked_fill(~attn_mask, -torch.inf)
    padded = max(0, 4 - dims)  # the fused kernels want (batch, heads, n, d)
    lift = (None,) * padded + (...,)
    query, key, value = query[lift], key[lift], value[lift]
    if attn_mask is not None:
        attn_mask = attn_mask[lift]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return silence(out[(0,) * padded][..., :width], who.queries).to(dtype)


def _narrowed(bias: Tensor, entries: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A bias in the dtype of the tokens; a narrower one may not hold it, so each row is first shifted to maximum 0."""
    if torch.finfo(dtype).max < torch.finfo(bias.dtype).max:
        top = bias.detach() if entries is None else bias.detach().masked_fill(~entries, -torch.inf)
        top = top.amax(-1, keepdim=True)
        bias = bias - top.masked_fill(top == -torch.inf, 0.0)
    return bias.to(dtype)


def _reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    tau: Tensor | None,
    seed: Tensor | None,
    n_iters: int,
    scale: float,
    l2: bool,
    dropout_p: float,
) -> Tensor:
    dtype = working_dtype(query.dtype)
    with without_autocast(query.device):
        who = combine(masks)
        q, k = query.to(dtype), key.to(dtype)
        q, k = centred(q, k, who.keys) if l2 else (q, k)
        q, k = silence(q, who.queries), silence(k, who.keys)
        problem = attention_problem(q, k, who, scale, l2)
        weights = reference_weights(problem, tau if tau is None else tau.to(q), n_iters)
        if seed is not None:
            weights = weights * kept_operator(seed, weights.detach(), dropout_p)
        out = weights @ silence(value.to(dtype), who.keys)
        return silence(out, who.queries).to(query.dtype)


def _check_tokens(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    for name, tokens in (("query", query), ("key", key), ("value", value)):
        checks.tensor(CALLER, name, tokens, min_dim=2)
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


def _check_scale(scale: float | None, query: Tensor) -> float:
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


def _spread(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Key and value heads repeated for the query heads that share them."""
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    return query, key, value


def _check_implicit(n_iters: int, backend: str) -> None:
    if n_iters < 3 or n_iters % 2 == 0:
        raise ValueError(
            f'{CALLER}: gradient="implicit" needs an odd n_iters ≥ 3, so that the weights end on rows near the limit; '
            f'got {n_iters}. gradient="unrolled" takes any.'
        )
    if backend == "reference":
        raise ValueError(f'{CALLER}: backend="reference" has the unrolled gradient only; use backend="torch".')


def _check_triton(query: Tensor, value: Tensor) -> None:
    if query.dtype == torch.float64 or max(query.shape[-1], value.shape[-1]) > 256:
        raise NotImplementedError(
            f'{CALLER}: backend="triton" serves float16, bfloat16 and float32 with up to 256 features; '
            f'got {query.dtype} with {query.shape[-1]} and {value.shape[-1]}. backend="torch" serves all.'
        )


def _check_causal(attn_mask: Tensor | None, softmax: bool) -> None:
    if not softmax:
        refuse_causal(CALLER)
    if attn_mask is not None:
        raise ValueError(f"{CALLER}: pass attn_mask or is_causal=True, not both; put the triangle into attn_mask.")


def refuse_causal(caller: str) -> NoReturn:
    raise NotImplementedError(
        f"{caller}: is_causal=True works with n_iters=1 (SoftMax) only, so far. Plain Sinkhorn under a triangular mask "
        "leaks and degenerates: a key's column sum runs over later queries, so earlier outputs would see the future, "
        "and the only doubly stochastic triangular matrix is the identity. A causal definition is to come."
    )


def _triangle(query: Tensor, key: Tensor) -> Tensor:
    return query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()


def _check_masks(attn_mask: Any, query_mask: Any, key_mask: Any, shape: torch.Size) -> Masks:
    """All masks with the rank of the scores `shape` = (…, n, m), or one less."""
    bias = entries = None
    if attn_mask is not None:
        if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
            checks.broadcasts(CALLER, "attn_mask", attn_mask, shape, "(…, n, m)")
            bias = with_rank(attn_mask, len(shape))
        else:
            checks.mask(CALLER, "attn_mask", attn_mask, shape, "(…, n, m)")
            entries = with_rank(attn_mask, len(shape))
    queries = _check_token_mask("query_mask", query_mask, shape[:-1])
    keys = _check_token_mask("key_mask", key_mask, torch.Size((*shape[:-2], shape[-1])))
    return Masks(bias, entries, queries, keys)


def _check_token_mask(name: str, mask: Any, shape: torch.Size) -> Tensor | None:
    """A mask (batch, n), to which a head axis is added where the tokens (batch, heads, n) have one."""
    if mask is None:
        return None
    if isinstance(mask, Tensor) and 2 <= mask.dim() < len(shape):
        mask = mask.reshape(*mask.shape[:-1], *(1,) * (len(shape) - mask.dim()), mask.shape[-1])
    checks.mask(CALLER, name, mask, shape, "the tokens")
    return with_rank(mask, len(shape))
