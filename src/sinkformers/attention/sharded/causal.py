"""Causal attention, streaming, to sharded sequences: each rank goes on with the sums of the rank before it.

Rows are normalised in order, so the ranks work one after the other; in the backward pass, in reverse.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkformers.attention.causal.backends.torch import ROWS, attend, walk_back
from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.attention.masks import Masks
from sinkformers.attention.sharded.call import ShardedCall
from sinkformers.core.modes import without_autocast
from sinkformers.core.problem import working_dtype
from sinkformers.distributed import Exchange, Ranks


class _AttendCausal(torch.autograd.Function):
    """Saves this rank's tokens and its sums at the start of every block of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ShardedCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        tau: Tensor | None,
    ) -> Tensor:
        ranks, m = call.ranks, call.m
        with without_autocast(query.device):
            local = _local_call(call, query, key, value, tau)
            columns = local.key.shape[-2]
            lead, steps, dtype = call.lead, call.definition().col_steps(), working_dtype(query.dtype)
            room = query.new_zeros(*lead, steps + 1, m, dtype=dtype)
            sums = _from_neighbour(ranks, room, -1)
            if ranks.rank > 0:
                received, expected = sums[..., :-1, :columns].clone(), sums[..., -1, :columns].clone()
                local = local.change(received=received, expected=expected)
            else:
                sums[..., :-1, :] = torch.finfo(dtype).min / 4
            out, starts = query.new_zeros(*lead, 0, value.shape[-1], dtype=dtype), None
            if call.n:
                result = attend(local.in_working_dtype(), call.first_row)
                sums[..., :-1, :columns], sums[..., -1, :columns] = result.received, result.expected
                out, starts = result.out, result.starts
            _to_neighbour(ranks, sums, 1)
        ctx.call = call.with_masks(*[None] * 4)
        masks = bias, *call.masks[1:]
        ctx.save_for_backward(query, key, value, tau, starts, local.expected, *masks)
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, tau, starts, expected, *masks = ctx.saved_tensors
        call, bias = ctx.call.with_masks(*masks), masks[0]
        ranks, dtype = call.ranks, working_dtype(query.dtype)
        found: dict[str, Tensor | None] = {"query": torch.zeros_like(query)}
        with without_autocast(query.device):
            local = _local_call(call, query, key, value, tau)
            columns = local.key.shape[-2]
            d_sums = _from_neighbour(ranks, query.new_zeros(*call.lead, local.n_iters // 2, call.m, dtype=dtype), 1)
            if call.n:
                local = local.change(received=starts[..., 0, :, :], expected=expected).in_working_dtype()
                d_after = d_sums[..., :columns]
                options: dict[str, Any] = {"needs_bias": ctx.needs_input_grad[4], "first_row": call.first_row}
                found, before = walk_back(local, starts, d_out.to(dtype), d_after, **options)
                d_sums[..., :columns] = before
            _to_neighbour(ranks, d_sums, -1)
            d_key, d_value = (
                ranks.scatter_sum(_whole(found.get(name), x, call), call.keys_by_rank, f"gradients of {name}s")
                for name, x in (("key", key), ("value", value))
            )
        grads = found["query"], d_key, d_value, found.get("bias"), found.get("tau")
        given = query, key, value, bias, tau
        each = zip(grads, given, ctx.needs_input_grad[1:], strict=True)
        return None, *(_like(grad, x) if needed else None for grad, x, needed in each)


def attend_causal_sharded(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, tau: Tensor | None) -> Tensor:
    """The output of this rank's queries, in their dtype, differentiable."""
    return _AttendCausal.apply(call, query, key, value, call.masks.bias, tau)


def _local_call(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, tau: Tensor | None) -> Any:
    """This rank's queries before the keys that they may see."""
    columns = call.first_row + call.n if call.triangle else call.m
    key, value = (
        _for_query_heads(call.ranks.gather(x, call.keys_by_rank, what)[..., :columns, :], call.lead)
        for x, what in ((key, "keys"), (value, "values"))
    )
    masks = call.masks
    keys = None
    if call.any_token_masks:
        every = torch.ones((), dtype=torch.bool, device=query.device) if masks.keys is None else masks.keys
        every = every.expand(*call.lead, call.keys_by_rank[call.ranks.rank])[..., None].to(torch.uint8)
        keys = call.ranks.gather(every, call.keys_by_rank, "key masks")[..., :columns, 0].bool()
    bias, entries = (
        x if x is None or x.shape[-1] == 1 else x[..., :columns].detach() for x in (masks.bias, masks.entries)
    )
    masks = Masks(bias, entries, masks.queries, keys)
    seed = torch.tensor(call.seed) if call.dropout_p > 0 else None
    by_head = None if tau is None else tau.detach().expand(call.lead)
    assert isinstance(call.n_iters, int)
    return CausalAttentionCall(
        query, key, value, *masks, by_head, seed, None, None, None, call.n_iters, call.scale, call.l2,
        call.dropout_p, call.triangle, True, ROWS,
    )  # fmt: skip


def _from_neighbour(ranks: Ranks, room: Tensor, step: int) -> Tensor:
    """What the rank before sends (`step` −1), or the rank after (1); what `room` holds where there is none."""
    source = ranks.rank + step
    if not 0 <= source < ranks.size or not room.numel():
        return room
    return Exchange(ranks, None, room, "running sums", source=source).wait()


def _to_neighbour(ranks: Ranks, sums: Tensor, step: int) -> None:
    to = ranks.rank + step
    if 0 <= to < ranks.size and sums.numel():
        Exchange(ranks, sums, None, "running sums", to=to).wait()


def _for_query_heads(x: Tensor, lead: torch.Size) -> Tensor:
    if x.dim() < 3 or x.shape[-3] == lead[-1]:
        return x
    return x.repeat_interleave(lead[-1] // x.shape[-3], -3)


def _whole(grad: Tensor | None, like: Tensor, call: ShardedCall) -> Tensor:
    """The gradient of the visible keys as that of all keys, summed over the query heads that share one."""
    whole = like.new_zeros(*like.shape[:-2], call.m, like.shape[-1], dtype=working_dtype(like.dtype))
    if grad is None:
        return whole
    if grad.shape[:-2] != like.shape[:-2]:
        grad = grad.unflatten(-3, (like.shape[-3], -1)).sum(-3)
    whole[..., : grad.shape[-2], :] = grad
    return whole


def _like(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
    """The gradient in the shape and dtype of its tensor; zeros where this rank has no queries to add to it."""
    if x is None or grad is None:
        return None if x is None else torch.zeros_like(x)
    if x.dim() > 1 and x.shape[-1] > max(1, grad.shape[-1]):  # a bias also has the columns that no query here may see
        grad = torch.nn.functional.pad(grad, (0, x.shape[-1] - grad.shape[-1]))
    return grad.sum_to_size(x.shape).to(x)
