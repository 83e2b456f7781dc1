"""Plan a call whose tokens are sharded over ranks: check it here, and that all ranks make the same."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.attention.arguments import CALLER, check_masks, check_scale, check_tokens
from sinkformers.attention.causal.plan import is_softmax
from sinkformers.attention.masks import Masks
from sinkformers.attention.plan import Plan, no_output
from sinkformers.attention.sharded.call import ShardedCall
from sinkformers.attention.sharded.function import attend_sharded
from sinkformers.core import checks
from sinkformers.core.arguments import relaxation_tensor
from sinkformers.distributed import Header, Ranks, SequenceGroup, agree


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
    masks: Masks  # with columns of `attn_mask` that are not checked
    n_iters: int | float
    tau: float | Tensor
    scale: float
    dropout_p: float
    seed: int


def plan_sharded(where: SequenceGroup, given: Arguments) -> Plan:
    """Plan a call on this rank's tokens. All ranks of the group have to get here."""
    ranks, device, checked, error = Ranks(CALLER, where.group), _device_of(given.query), None, None
    try:
        checked = _check(given)
        settings, header = _settings(given, checked, where.kv), _header(checked, given.attn_mask)
    except Exception as raised:  # the other ranks have to learn of it
        error, settings, header = raised, {}, Header(0, 0, 0, 0, 0, 0)
    headers = agree(ranks, settings, header, device, error)
    assert checked is not None
    queries, keys = [each.queries for each in headers], [each.keys for each in headers]
    _check_columns(headers, sum(keys))
    query, key, value, masks = checked[:4]
    if query.shape[-1] == 0:  # a feature that is zero gives the same scores
        query, key = F.pad(query, (0, 1)), F.pad(key, (0, 1))
    call = ShardedCall(
        ranks, where.kv, queries, keys, masks, any(each.has_masks for each in headers),
        any(each.mask_rows for each in headers), query.shape[:-2], checked.n_iters, checked.scale,
        given.cost == "l2", checked.dropout_p, headers[0].seed,
    )  # fmt: skip
    if 0 in (sum(queries), sum(keys), query.shape[:-2].numel(), value.shape[-1]):
        return Plan("torch", no_output, (query, key, value, masks.bias, checked.tau))
    tau = relaxation_tensor(checked.tau, query)
    return Plan("torch", attend_sharded, (call, query, key, value, tau))


def _check(given: Arguments) -> _Checked:
    query, key, value = check_tokens(*given[:3], given.enable_gqa)
    n_iters = checks.iterations(CALLER, given.n_iters)
    tau = checks.relaxation(CALLER, given.tau, "query", query)
    dropout_p = checks.probability(CALLER, "dropout_p", given.dropout_p)
    checks.one_of(CALLER, "cost", given.cost, ("dot", "l2"))
    scale = check_scale(given.scale, query)
    columns = given.attn_mask.shape[-1] if _is_matrix(given.attn_mask) else key.shape[-2]
    masks = check_masks(given.attn_mask, given.query_mask, None, query, columns)
    keys = check_masks(None, None, given.key_mask, query, key.shape[-2]).keys
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout_p > 0 else 0
    return _Checked(query, key, value, masks.with_keys(keys), n_iters, tau, scale, dropout_p, seed)


def _is_matrix(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() > 0


def _device_of(tokens: Any) -> torch.device:
    return tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")


def _settings(given: Arguments, checked: _Checked, kv: str) -> Mapping[str, Any]:
    """What all ranks must have alike, in words."""
    query, key, value, tau = checked.query, checked.key, checked.value, checked.tau
    sizes = {name: (*x.shape[:-2], "n", x.shape[-1]) for name, x in zip(("query", "key", "value"), checked, strict=False)}
    needed = [x for x in (query, key, value, given.attn_mask, tau) if isinstance(x, Tensor) and x.requires_grad]
    return {
        "dtype": query.dtype,
        "device": query.device.type,
        **{f"shape of {name}": size for name, size in sizes.items()},
        **{name: getattr(given, name) for name in _ALIKE},
        "n_iters": checked.n_iters,
        "tau": tau.detach().flatten().tolist() if isinstance(tau, Tensor) else tau,
        "scale": checked.scale,
        "kv": kv,
        "gradients": torch.is_grad_enabled() and len(needed) > 0,
    }


_ALIKE = ("dropout_p", "is_causal", "cost", "gradient", "tol", "max_iters", "causal")


def _header(checked: _Checked, attn_mask: Tensor | None) -> Header:
    rows, columns = (0, 0) if attn_mask is None else tuple((1, *attn_mask.shape)[-2:])
    has_masks = checked.masks.queries is not None or checked.masks.keys is not None
    return Header(checked.query.shape[-2], checked.key.shape[-2], checked.seed, int(has_masks), rows, columns)


def _check_columns(headers: list[Header], m: int) -> None:
    """Every rank checks the masks of all, so that all of them raise."""
    for rank, header in enumerate(headers):
        if header.mask_rows and header.mask_columns not in (1, m):
            raise ValueError(
                f"{CALLER}: with a group, attn_mask has this rank's queries as rows and the keys of all ranks as "
                f"columns, (…, {header.queries}, {m}); got {header.mask_columns} columns on rank {rank}. For padding "
                "pass query_mask and key_mask of this rank's tokens."
            )
