"""`sinkhorn_attention`: attention as users call it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.arguments import (
    CALLER,
    check_causal,
    check_implicit,
    check_masks,
    check_order,
    check_scale,
    check_tokens,
    check_triton,
    spread,
    triangle,
)
from sinkformers.attention.dropout import kept_operator
from sinkformers.attention.operators import attend
from sinkformers.attention.participants import Masks, centred, combine, silence
from sinkformers.attention.plain import attention_problem
from sinkformers.attention.softmax import softmax_attention
from sinkformers.core import backends, checks
from sinkformers.core.problem import working_dtype
from sinkformers.core.reference import reference_weights
from sinkformers.core.registration import without_autocast
from sinkformers.core.sinkhorn import relaxation_tensor, sinkhorn, with_rank


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
    allow_one_way_mask: bool = False,
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
        allow_one_way_mask: accept a square `attn_mask` that orders the tokens, as a triangle does. Without it such a
            mask is refused unless the weights are SoftMax (`n_iters=1` or the number `tau=0`): column sums run over all
            queries, so outputs would depend on tokens that the mask hides (docs/attention.md).

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
    query, key, value = check_tokens(query, key, value, enable_gqa)
    n, m = query.shape[-2], key.shape[-2]
    n_iters = checks.iterations(CALLER, n_iters)
    checks.one_of(CALLER, "gradient", gradient, ("unrolled", "implicit"))
    relaxation = checks.relaxation(CALLER, tau, "query", query, zero=gradient == "unrolled")
    dropout_p = checks.probability(CALLER, "dropout_p", dropout_p)
    checks.one_of(CALLER, "cost", cost, ("dot", "l2"))
    chosen = backends.choose(CALLER, backend, query.device)
    if chosen == "triton":
        check_triton(query, value)
    softmax = isinstance(relaxation, float) and (n_iters == 1 or relaxation == 0)
    if gradient == "implicit":
        check_implicit(n_iters, chosen)
    if is_causal:
        check_causal(attn_mask, n_iters == 1 or softmax)
    scale = check_scale(scale, query)
    masks = check_masks(attn_mask, query_mask, key_mask, query, m)
    check_order(attn_mask, masks, n_iters, relaxation, allow_one_way_mask)
    if is_causal and n < m:  # the keys after the last query are seen by none
        key, value, m = key[..., :n, :], value[..., :n, :], n
        masks = masks.with_keys(None if masks.keys is None else masks.keys[..., :n])
    if 0 in (*query.shape[:-2], n, m, value.shape[-1]):
        return _nothing(*spread(query, key, value, enable_gqa), masks.bias, relaxation)
    if query.shape[-1] == 0:  # a feature that is zero gives the same scores
        query, key = F.pad(query, (0, 1)), F.pad(key, (0, 1))
    if softmax and backend == "auto":
        return softmax_attention(query, key, value, masks, dropout_p, is_causal, scale, enable_gqa, cost == "l2")
    if is_causal:
        masks = masks.with_entries(with_rank(triangle(query, key), query.dim()))
    query, key, value = spread(query, key, value, enable_gqa)
    seed = torch.randint(2**62, ()) if dropout_p > 0 else None
    by_head = relaxation_tensor(relaxation, query)
    if chosen == "reference":
        return _reference_attention(query, key, value, masks, by_head, seed, n_iters, scale, cost == "l2", dropout_p)
    settings = (n_iters, scale, cost == "l2", dropout_p, gradient == "implicit", chosen)
    return attend(query, key, value, *masks, by_head, seed, *settings)[0].to(query.dtype)


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
    allow_one_way_mask: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sinkhorn_attention` for those who want to see the weights (…, n, m): output and weights, after dropout."""
    query, key, value = check_tokens(query, key, value, False)
    masks = check_masks(attn_mask, query_mask, key_mask, query, key.shape[-2])
    check_order(attn_mask, masks, n_iters, tau, allow_one_way_mask)
    scale = check_scale(scale, query)
    dtype = working_dtype(query.dtype)
    with without_autocast(query.device):
        who = combine(masks)
        q, k = silence(query.to(dtype), who.queries), silence(key.to(dtype), who.keys)
        problem = attention_problem(q, k, who, scale, False)
        weights = F.dropout(sinkhorn(problem.scores, n_iters=n_iters, tau=tau), dropout_p)
        out = silence(weights @ silence(value.to(dtype), who.keys), who.queries)
    return out.to(query.dtype), weights.to(query.dtype)


def _nothing(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, tau: float | Tensor) -> Tensor:
    """Zeros (…, n, e), where there are no keys, or no output at all: an empty sum is 0. All gradients are zeros."""
    inputs = (each for each in (query, key, value, bias, tau) if isinstance(each, Tensor))
    zero = sum(each.reshape(-1)[:0].sum() for each in inputs)
    return query.new_zeros(*query.shape[:-1], value.shape[-1]) + zero


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
