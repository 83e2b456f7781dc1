"""`sinkhorn_attention`: attention as users call it."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.arguments import (
    CALLER,
    NO_MASKS,
    are_plain,
    check_causal,
    check_gradient_in_order,
    check_implicit,
    check_masks,
    check_order,
    check_scale,
    check_stop,
    check_tokens,
    repeat_groups,
    tau_is_zero,
    triangle,
)
from sinkformers.attention.attend import BACKENDS, attend
from sinkformers.attention.call import AttentionCall
from sinkformers.attention.causal import CacheLayer
from sinkformers.attention.causal.plan import Settings, is_softmax, plan_causal
from sinkformers.attention.limit import BACKENDS as LIMIT_BACKENDS
from sinkformers.attention.limit import LimitAttentionCall, LimitAttentionResult, attend_limit
from sinkformers.attention.plan import Plan, no_output
from sinkformers.attention.softmax import softmax_attention
from sinkformers.core import checks
from sinkformers.core.arguments import relaxation_tensor, with_rank
from sinkformers.core.backend import Backend
from sinkformers.core.limit import HasEvidence, warn_unconverged
from sinkformers.distributed import active_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_USUAL = (Tensor, torch.nn.Parameter)  # types that are no DTensors


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
    n_iters: int | float = 3,
    tau: float | Tensor = 1.0,
    cost: str = "dot",
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    gradient: str | None = None,
    tol: float | None = None,
    max_iters: int | None = None,
    backend: str = "auto",
    allow_one_way_mask: bool = False,
    causal: str | None = None,
    cache: CacheLayer | None = None,
    group: "ProcessGroup | DeviceMesh | None" = None,
    kv: str | None = None,
) -> Tensor:
    """Attention whose weights are normalised by Sinkhorn's algorithm instead of SoftMax.

    The signature and the conventions are those of `F.scaled_dot_product_attention`; at `n_iters=1` it is that function.

    Args:
        query: (…, n, d); key: (…, m, d); value: (…, m, e). With heads, (batch, heads, n, d).
        attn_mask: boolean, `True` where a query attends to a key, or a float bias added to the scores; broadcasts to
            (…, n, m). Minus infinity means masked, and so does a bias of `finfo(dtype).min / 2` or less.
        dropout_p: drops weights after the last normalisation. Unlike a module, a function knows no training mode.
        is_causal: query i sees the keys up to i, as in SDPA. With more than one normalisation that implies
            `causal="streaming"`, and needs as many queries as keys.
        scale: of the dot products; 1/√d by default.
        enable_gqa: query heads share key and value heads, in groups.
        n_iters, tau: as in `sinkhorn`; `n_iters=math.inf` is the limit, by Newton's method. A tensor `tau` broadcasts
            to the leading axes: one value per head is (heads,).
        cost: `"dot"`, or `"l2"` for scores −½·scale·|q − k|².
        query_mask, key_mask: boolean (batch, n) and (batch, m), `True` at valid tokens. Where it has fewer axes than
            the tokens, those before the last are the tokens' first. A masked token is left out of the sums of the other
            side too, which masking a key alone does not do: self-attention passes both.
        gradient: `"unrolled"`, the exact gradient of the steps taken, or `"implicit"`, that of the limit at the weights
            reached (odd `n_iters` ≥ 3). By default it is unrolled for a finite `n_iters`, and implicit for `math.inf`.
        tol: for `n_iters=math.inf`, the relative error of the column sums at which a head is done; 1e-3 by default. For
            `tau` < 1 that is relative to the sums that the limit would have at the column potentials reached.
        max_iters: for `n_iters=math.inf`, the most products with `exp(scores)` or its transpose, 1000 by default. Heads
            that have not converged by then have the best weights found, and give one `ConvergenceWarning`.
        backend: `auto`, `native`, `torch`, `triton`, or `reference`, which can be differentiated twice.
        allow_one_way_mask: accept a square `attn_mask` that orders the tokens, as a triangle does. Otherwise such a
            mask is refused unless the weights are SoftMax (`n_iters=1` or the number `tau=0`): column sums run over all
            queries, so outputs would depend on tokens that the mask hides (docs/attention.md).
        causal: `"streaming"` or `"prefix"`: rows are normalised in order, under whatever masks are given, so that no
            output depends on a later query; see `causal_sinkhorn`. Any n and m, so that the cross-attention of a
            decoder is causal too. `n_iters` is odd and finite.
        cache: one layer of a `SinkhornCache`, `cache[0]` for instance, with the tokens before these. Masks then have
            all keys, the cached ones first. Gradients do not flow into the cache.
        group: a process group or a one-dimensional `DeviceMesh` whose ranks share the sequences (docs/distributed.md).
            The tokens are then those of this rank, which follow those of the ranks before it. `query_mask` and
            `key_mask` have this rank's tokens. `attn_mask` has its queries and the keys of all ranks, or one row for
            all queries and the keys of every rank for itself.
        kv: how the keys and values of other ranks get here: `"gather"`, the default, or `"ring"`, which holds those of
            two ranks at a time and sends them in every pass. It goes with `group`.

    Returns:
        (…, n, e) in the dtype of the query. Masked queries give zeros.

    Padding has no effect: the contents of masked tokens, NaN included, change no output and no gradient, and their own
    gradients are exact zeros.

    Examples:
        >>> import torch, sinkformers
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind()
        >>> real = torch.arange(10) < torch.tensor([[10], [7]])
        >>> out = sinkformers.sinkhorn_attention(q, k, v, n_iters=5, query_mask=real, key_mask=real)
        >>> out.shape, out[1, :, 7:].abs().max().item()
        (torch.Size([2, 4, 10, 16]), 0.0)
    """
    plan = _plan(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, n_iters, tau, cost, query_mask, key_mask,
        gradient, tol, max_iters, backend, allow_one_way_mask, causal, cache, group, kv,
    )  # fmt: skip
    return plan.function(*plan.arguments)


def backend_for(*args: Any, **kwargs: Any) -> str:
    """The name of the backend that serves a call of `sinkhorn_attention` with these arguments.

    Returns:
        A name that `backend` takes, or `"sdpa"` where the call is SoftMax attention and torch's own function serves it.

    Examples:
        >>> import torch, sinkformers
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind()
        >>> sinkformers.backend_for(q, k, v, n_iters=5, backend="torch"), sinkformers.backend_for(q, k, v, n_iters=1)
        ('torch', 'sdpa')
    """
    return plan_attention(*args, **kwargs).backend


def plan_attention(*args: Any, **kwargs: Any) -> Plan:
    """How a call of `sinkhorn_attention` with these arguments is served."""
    bound = inspect.signature(sinkhorn_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    return _plan(*bound.arguments.values())


def attention_with_evidence(*args: Any, **kwargs: Any) -> tuple[Tensor, HasEvidence | None]:
    """`sinkhorn_attention` that also returns how each head converged at `n_iters=math.inf`; None for other calls."""
    plan = plan_attention(*args, **kwargs)
    if plan.function is not _run_to_the_limit:
        return plan.function(*plan.arguments), None
    result = _find_limit(*plan.arguments)
    return result.out.to(plan.arguments[0].query.dtype), result


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    n_iters: int | float,
    tau: float | Tensor,
    cost: str,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    gradient: str | None,
    tol: float | None,
    max_iters: int | None,
    backend: str,
    allow_one_way_mask: bool,
    causal: str | None,
    cache: CacheLayer | None,
    group: Any,
    kv: str | None,
) -> Plan:
    """Check the arguments of `sinkhorn_attention`, describe the call, and choose its backend."""
    if group is not None or active_group() is not None or type(query) not in _USUAL:
        from sinkformers.attention.sharded import Arguments, plan_in_group

        plan = plan_in_group(group, kv, Arguments(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, n_iters, tau, cost, query_mask,
            key_mask, gradient, tol, max_iters, backend, allow_one_way_mask, causal, cache,
        ))  # fmt: skip
        if plan is not None:
            return plan
    elif kv is not None:
        raise ValueError(f"{CALLER}: kv says how tokens reach the ranks of a group; got kv={kv!r} and no group.")
    no_masks = attn_mask is None and query_mask is None and key_mask is None and not is_causal
    usual = no_masks and type(n_iters) is int and n_iters > 1 and type(tau) is float and tau == 1
    usual = usual and type(dropout_p) is float and dropout_p == 0 and cost == "dot" and gradient in (None, "unrolled")
    usual = usual and tol is None and max_iters is None and causal is None and cache is None
    if usual and not enable_gqa and are_plain(query, key, value):  # for small tokens the checks below take longer
        scale = check_scale(scale, query)
        assert isinstance(n_iters, int)
        call = AttentionCall(query, key, value, *NO_MASKS, None, None, None, n_iters, scale, False, 0.0, False)
        chosen = BACKENDS.choose(CALLER, backend, call)
        return Plan(chosen.name, _run, (call, chosen), BACKENDS, call)
    query, key, value = check_tokens(query, key, value, enable_gqa)
    n_iters = checks.iterations(CALLER, n_iters)
    stop = check_stop(n_iters, gradient, tol, max_iters)
    implicit = gradient == "implicit" or stop is not None
    zero = not implicit or (stop is not None and tau_is_zero(tau))
    relaxation = checks.relaxation(CALLER, tau, "query", query, zero=zero)
    dropout_p = checks.probability(CALLER, "dropout_p", dropout_p)
    checks.one_of(CALLER, "cost", cost, ("dot", "l2"))
    softmax = is_softmax(n_iters, relaxation)
    scale, l2 = check_scale(scale, query), cost == "l2"
    if causal is not None or cache is not None or (is_causal and n_iters != 1 and not softmax):
        check_gradient_in_order(gradient)
        settings = (dropout_p, is_causal, scale, enable_gqa, n_iters, relaxation, l2, backend, causal, cache)
        return plan_causal(query, key, value, attn_mask, query_mask, key_mask, Settings(*settings))
    if implicit and stop is None:
        check_implicit(n_iters)
    if is_causal:
        check_causal(attn_mask)
    masks = check_masks(attn_mask, query_mask, key_mask, query, key.shape[-2])
    if attn_mask is not None:
        check_order(attn_mask, masks, n_iters, relaxation, allow_one_way_mask)
    n, m = query.shape[-2], key.shape[-2]
    if is_causal and n < m:  # no query attends to the keys after the last one
        key, value = key[..., :n, :], value[..., :n, :]
        masks = masks.with_keys(None if masks.keys is None else masks.keys[..., :n])
    if query.shape[-1] == 0:  # a feature that is zero gives the same scores
        query, key = F.pad(query, (0, 1)), F.pad(key, (0, 1))
    empty = 0 in query.shape or 0 in value.shape
    if softmax and backend == "auto" and not empty:
        settings = (dropout_p, is_causal, scale, enable_gqa, l2)
        return Plan("sdpa", softmax_attention, (query, key, value, masks, *settings))
    if is_causal:
        masks = masks.with_entries(with_rank(triangle(query, key), query.dim()))
    if enable_gqa:
        query, key, value = repeat_groups(query, key, value, enable_gqa)
    by_head = relaxation_tensor(relaxation, query)
    if stop is None or softmax:
        steps = 1 if isinstance(n_iters, float) else n_iters  # where tau is 0 the limit is SoftMax
        settings = (steps, scale, l2, dropout_p, implicit and not softmax)
        call, backends = AttentionCall(query, key, value, *masks, by_head, None, None, *settings), BACKENDS
    else:
        call = LimitAttentionCall(
            query, key, value, *masks, by_head, None, None, scale, l2, dropout_p, stop.tol, stop.max_iters
        )
        backends = LIMIT_BACKENDS
    chosen = backends.choose(CALLER, backend, call)
    if empty:
        return Plan(chosen.name, no_output, (query, key, value, masks.bias, relaxation))
    function = _run if isinstance(call, AttentionCall) else _run_to_the_limit
    return Plan(chosen.name, function, (call, chosen), backends, call)


def _run(call: AttentionCall, backend: Backend) -> Tensor:
    if call.dropout_p > 0:  # drawn here, so that planning a call leaves the generator alone
        call = call.change(seed=torch.randint(2**62, (), device="cpu"))
    if backend.composite:
        return backend.forward(call)
    out, dtype = attend.output(call, backend), call.query.dtype
    return out if out.dtype == dtype else out.to(dtype)


def _run_to_the_limit(call: LimitAttentionCall, backend: Backend) -> Tensor:
    out, dtype = _find_limit(call, backend).out, call.query.dtype
    return out if out.dtype == dtype else out.to(dtype)


def _find_limit(call: LimitAttentionCall, backend: Backend) -> LimitAttentionResult:
    if call.dropout_p > 0:
        call = call.with_attention(call.attention().change(seed=torch.randint(2**62, (), device="cpu")))
    result = attend_limit(call, backend)
    warn_unconverged(CALLER, "heads", call.tol, result)
    return result
