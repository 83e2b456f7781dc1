"""Sharded attention as one autograd Function, whose backward pass communicates as its forward pass does."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkformers.attention.sharded import limit
from sinkformers.attention.sharded.call import ShardedCall, Valid
from sinkformers.attention.sharded.gradients import Backward
from sinkformers.attention.sharded.limit import Evidence, ImplicitBackward
from sinkformers.attention.sharded.steps import Steps, attend
from sinkformers.attention.sharded.tiles import ColStep, RowStep, Tiles
from sinkformers.core.limit import warn_unconverged
from sinkformers.core.modes import without_autocast
from sinkformers.core.problem import working_dtype


class _Attend(torch.autograd.Function):
    """Saves this rank's tokens and output, and three vectors per step, of its rows or of all columns.

    What was gathered is let go, and gathered again in the backward pass.
    """

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
        with without_autocast(query.device):
            tiles = Tiles(call, query, key, value)
            out, steps, evidence = _attend(tiles, _by_head(tau, query))
        if evidence is not None:
            warn_unconverged(call.ranks.caller, "heads", call.tol, evidence)
        ctx.call, ctx.kinds = call.with_masks(*[None] * 4), [col.is_direct for col in steps.cols]
        rows, cols = ([part for step in kind for part in step[:3]] for kind in (steps.rows, steps.cols))
        assert tiles.shift is not None
        masks = bias, call.masks.entries  # those of tokens are in `valid`
        ctx.save_for_backward(query, key, value, *masks, tau, out, tiles.shift, *tiles.valid, *rows, *cols)
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, bias, entries, tau, out, shift, *saved = ctx.saved_tensors
        call, valid, vectors = ctx.call.with_masks(bias, entries, None, None), Valid(*saved[:3]), saved[3:]
        count = len(vectors) - 3 * len(ctx.kinds)
        rows = [RowStep(*vectors[at : at + 3]) for at in range(0, count, 3)]
        cols = [
            ColStep(vectors[at], vectors[at + 1], vectors[at + 2], kind)
            for at, kind in zip(range(count, len(vectors), 3), ctx.kinds, strict=True)
        ]
        with without_autocast(query.device):
            tiles = Tiles(call, query, key, value, valid)
            tiles.shift = shift
            given = tiles, Steps(rows, cols), _by_head(tau, query), out, d_out.to(out.dtype)
            backward = ImplicitBackward(*given, tol=call.tol) if call.implicit else Backward(*given)
            found = backward.run(needs_bias=ctx.needs_input_grad[4])
        grads = [
            None if grad is None or x is None else grad.sum_to_size(x.shape).to(x)
            for grad, x in zip(found, (query, key, value, bias, tau), strict=True)
        ]
        return None, *grads


def _attend(tiles: Tiles, tau: Tensor | None) -> tuple[Tensor, Steps, Evidence | None]:
    call = tiles.call
    if call.n_iters == math.inf:
        return limit.attend(tiles, tau, call.tol, call.max_products)
    out, steps = attend(tiles, tau)
    return out, limit.last_row_step(steps) if call.implicit else steps, None


def _by_head(tau: Tensor | None, query: Tensor) -> Tensor | None:
    dtype = working_dtype(query.dtype)
    return None if tau is None else tau.detach().to(query.device, dtype).expand(query.shape[:-2])


def attend_sharded(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, tau: Tensor | None) -> Tensor:
    """The output of this rank's queries, in their dtype, differentiable."""
    return _Attend.apply(call, query, key, value, call.masks.bias, tau)
