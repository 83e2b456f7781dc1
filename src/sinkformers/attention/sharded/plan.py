"""Plan a call whose tokens are sharded over ranks: check it here, and that all ranks make the same."""

import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.arguments import (
    CALLER,
    Stop,
    check_causal,
    check_gradient_in_order,
    check_implicit,
    check_masks,
    check_scale,
    check_stop,
    check_tokens,
    tau_is_zero,
)
from sinkformers.attention.causal.plan import is_softmax
from sinkformers.attention.masks import Masks
from sinkformers.attention.plan import Plan, no_output
from sinkformers.attention.sharded.call import ShardedCall
from sinkformers.attention.sharded.causal import attend_causal_sharded
from sinkformers.attention.sharded.function import attend_sharded
from sinkformers.attention.sharded.key_bias import has_own_columns, with_all_columns
from sinkformers.attention.sharded.one_way import refuse_one_sided
from sinkformers.core import checks
from sinkformers.core.arguments import relaxation_tensor
from sinkformers.core.causal import DEFINITIONS, causal_iterations
from sinkformers.core.limit import MOST_PRODUCTS
from sinkformers.distributed import Header, Ranks, SequenceGroup, active_group, agree, sequence_group

NOT_COMPILED = "sinkformers: attention in a process group reads what the ranks tell each other, and is not compiled"
_attend = torch.compiler.disable(attend_sharded, reason=NOT_COMPILED)
_attend_in_order = torch.compiler.disable(attend_causal_sharded, reason=NOT_COMPILED)


class Arguments(NamedTuple):
    """The arguments of `sinkhorn_attention` as they were given, tokens first."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    n_iters: int | float
    tau: float | Tensor
    cost: str
    query_mask: Tensor | None
    key_mask: Tensor | None
    gradient: str | None
    tol: float | None
    max_iters: int | None
    backend: str
    allow_one_way_mask: bool
    causal: str | None
    cache: Any


class _Checked(NamedTuple):
    """What a rank can check by itself."""

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks  # the columns of `attn_mask` are checked later
    n_iters: int | float
    tau: float | Tensor
    in_order: bool  # rows are normalised in order
    stop: Stop
    scale: float
    dropout_p: float
    seed: int


@partial(torch.compiler.disable, reason=NOT_COMPILED)
def plan_in_group(group: Any, kv: str | None, given: Arguments) -> Plan | None:
    """Plan a call in a group, in that of `sequence_parallel`, or in that of DTensors; None if it has one rank."""
    if has_dtensors(given.query, given.key, given.value):
        return _plan_dtensors(group, kv, given)
    around = active_group() if group is None else None
    if group is None and around is None:
        return None
    where = sequence_group(CALLER, group if around is None else around.group, kv or (around.kv if around else "gather"))
    return None if where.group.size() == 1 else _plan(where, given)


def has_dtensors(*tokens: Any) -> bool:
    """Whether one of these is a DTensor. Its module takes long to import, and is if there is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tokens)


def _plan_dtensors(group: Any, kv: str | None, given: Arguments) -> Plan:
    from sinkformers.attention.sharded.dtensor import token_axis_group, wrapped

    if group is not None:
        raise ValueError(f"{CALLER}: DTensors have a group of their own; got one in group= too. Leave it out.")
    tokens = {"query": given.query, "key": given.key, "value": given.value}
    masks = {"attn_mask": given.attn_mask, "query_mask": given.query_mask, "key_mask": given.key_mask}
    where = sequence_group(CALLER, token_axis_group(tokens, masks), kv or "gather")
    query, key, value = (x.to_local() for x in tokens.values())  # pyright: ignore[reportCallIssue]
    plan = _plan(where, given._replace(query=query, key=key, value=value))
    return wrapped(plan, given.query, given.value)  # pyright: ignore[reportArgumentType]


def _plan(where: SequenceGroup, given: Arguments) -> Plan:
    """Plan a call on this rank's tokens. All ranks of the group have to get here."""
    ranks, device, checked, error = Ranks(CALLER, where.group), _device_of(given.query), None, None
    settings, header = {}, Header(*8 * (0,))
    try:
        checked = _check(given, where.kv)
        settings, header = _settings(given, checked, where.kv), _header(checked, given.attn_mask)
    except Exception as raised:  # the other ranks have to learn of it
        error = raised
    headers = agree(ranks, settings, header, device, error)
    assert checked is not None
    call = _describe(ranks, where.kv, given, checked, headers)
    query, key, value, tau = checked.query, checked.key, checked.value, checked.tau
    if query.shape[-1] == 0:  # a feature that is zero gives the same scores
        query, key = F.pad(query, (0, 1)), F.pad(key, (0, 1))
    if 0 in (sum(call.queries_by_rank), call.m, call.lead.numel(), value.shape[-1]):
        return Plan("torch", no_output, (query, key, value, call.masks.bias, tau))
    softmax = is_softmax(call.n_iters, tau)
    if not (softmax or call.n_iters == 1 or checked.in_order or given.allow_one_way_mask):
        refuse_one_sided(call, device)
    by_head = relaxation_tensor(tau, query)
    if softmax and call.n_iters != 1:
        call, by_head = call._replace(n_iters=1, implicit=False), None
    function = _attend_in_order if checked.in_order and call.n_iters != 1 else _attend
    return Plan("torch", function, (call, query, key, value, by_head))


def _check(given: Arguments, kv: str) -> _Checked:
    if given.backend not in ("auto", "torch"):
        raise NotImplementedError(
            f'{CALLER}: with a group, backend must be "auto" or "torch", which computes blocks of rows; got '
            f"{given.backend!r}."
        )
    query, key, value = check_tokens(*given[:3], given.enable_gqa)
    n_iters = checks.iterations(CALLER, given.n_iters)
    stop = check_stop(n_iters, given.gradient, given.tol, given.max_iters)
    implicit = given.gradient == "implicit" or stop is not None
    zero = not implicit or (stop is not None and tau_is_zero(given.tau))
    tau = checks.relaxation(CALLER, given.tau, "query", query, zero=zero)
    dropout_p = checks.probability(CALLER, "dropout_p", given.dropout_p)
    checks.one_of(CALLER, "cost", given.cost, ("dot", "l2"))
    scale = check_scale(given.scale, query)
    if given.is_causal:
        check_causal(given.attn_mask)
    in_order = given.causal is not None or (given.is_causal and not is_softmax(n_iters, tau))
    if in_order or given.cache is not None:
        _check_order(given, n_iters, kv)
    elif implicit and stop is None:
        check_implicit(n_iters)
    columns = given.attn_mask.shape[-1] if _is_matrix(given.attn_mask) else key.shape[-2]
    masks = check_masks(given.attn_mask, given.query_mask, None, query, columns)
    masks = masks.with_keys(check_masks(None, None, given.key_mask, query, key.shape[-2]).keys)
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout_p > 0 else 0
    stop = Stop(0.0, MOST_PRODUCTS) if stop is None else stop
    return _Checked(query, key, value, masks, n_iters, tau, in_order, stop, scale, dropout_p, seed)


def _check_order(given: Arguments, n_iters: int | float, kv: str) -> None:
    check_gradient_in_order(given.gradient)
    causal_iterations(CALLER, n_iters)
    if given.causal is not None:
        checks.one_of(CALLER, "causal", given.causal, DEFINITIONS)
    if given.cache is not None:
        raise NotImplementedError(f"{CALLER}: a cache of tokens cannot be sharded; generate without a group.")
    if given.causal == "prefix":
        raise NotImplementedError(f'{CALLER}: with a group, causal must be "streaming"; got "prefix".')
    if kv == "ring" and n_iters != 1:
        raise NotImplementedError(
            f'{CALLER}: causal attention with a group takes kv="gather" only: rows are normalised one after the other, '
            "and each of them needs all its keys."
        )


def _describe(ranks: Ranks, kv: str, given: Arguments, checked: _Checked, headers: list[Header]) -> ShardedCall:
    queries, keys = [each.queries for each in headers], [each.keys for each in headers]
    masks = checked.masks
    if has_own_columns(headers):
        masks = with_all_columns(ranks, headers, masks, checked.query)
    else:
        _check_columns(headers, sum(keys))
    if given.is_causal and checked.in_order and queries != keys:
        raise ValueError(
            f"{CALLER}: is_causal=True with more than one normalisation needs as many queries as keys on every rank; "
            f"got {queries} and {keys}."
        )
    any_entry_masks = any(each.has_matrix for each in headers)
    return ShardedCall(
        ranks, kv, queries, keys, masks, any(each.has_masks for each in headers), any_entry_masks,
        given.is_causal, checked.query.shape[:-2], checked.n_iters,
        given.gradient == "implicit" or checked.n_iters == math.inf, checked.scale, given.cost == "l2",
        checked.dropout_p, headers[0].seed, *checked.stop,
    )  # fmt: skip


def _is_matrix(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() > 0


def _device_of(tokens: Any) -> torch.device:
    return tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")


_ALIKE = ("dropout_p", "is_causal", "cost", "gradient", "tol", "max_iters", "causal", "allow_one_way_mask")


def _settings(given: Arguments, checked: _Checked, kv: str) -> Mapping[str, Any]:
    """What all ranks must have alike, in words."""
    query, key, value, tau = checked.query, checked.key, checked.value, checked.tau
    needed = [x for x in (query, key, value, given.attn_mask, tau) if isinstance(x, Tensor) and x.requires_grad]
    return {
        "dtype": query.dtype,
        "device": query.device.type,
        **{f"the shape of {name}": (*x.shape[:-2], "tokens", x.shape[-1]) for name, x in _named(query, key, value)},
        **{name: getattr(given, name) for name in _ALIKE},
        "n_iters": checked.n_iters,
        "tau": tau.detach().flatten().tolist() if isinstance(tau, Tensor) else tau,
        "scale": checked.scale,
        "kv": kv,
        "gradients": torch.is_grad_enabled() and len(needed) > 0,
    }


def _named(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[str, Tensor]]:
    return [("query", query), ("key", key), ("value", value)]


def _header(checked: _Checked, attn_mask: Tensor | None) -> Header:
    rows, columns = (0, 0) if attn_mask is None else (1, *attn_mask.shape)[-2:]
    has_masks = checked.masks.queries is not None or checked.masks.keys is not None
    needs_gradient = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    has_matrix, n, m = attn_mask is not None, checked.query.shape[-2], checked.key.shape[-2]
    return Header(n, m, checked.seed, int(has_masks), int(has_matrix), rows, columns, int(needs_gradient))


def _check_columns(headers: list[Header], m: int) -> None:
    """Every rank checks the masks of all, so that all of them raise."""
    for rank, header in enumerate(headers):
        if header.has_matrix and header.mask_columns not in (1, m):
            raise ValueError(
                f"{CALLER}: with a group, attn_mask has this rank's queries as rows and the keys of all ranks as "
                f"columns, (…, {header.queries}, {m}), or one row for all queries and every rank its own keys; "
                f"got {header.mask_rows} rows and {header.mask_columns} columns on rank {rank}. For padding pass "
                "query_mask and key_mask of this rank's tokens."
            )
