"""Causal attention of a block of rows in torch's own operations, in the log domain, and its exact gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.attention.causal.visible import part_of, tokens_that_count, valid_rows
from sinkformers.attention.dropout import dropout_mask
from sinkformers.attention.masks import zero_masked
from sinkformers.core.causal import shifted
from sinkformers.core.problem import working_dtype


class Sums(NamedTuple):
    """What keys have received in each column step, as logarithms, and what uniform attention would have given them."""

    received: Tensor  # (..., column steps, m)
    expected: Tensor  # (..., m), with the leading axes that masks have

    def first(self, columns: int) -> "Sums":
        return Sums(self.received[..., :columns], self.expected[..., :columns])


class Block(NamedTuple):
    """The steps of a block of rows, (..., rows, columns) each: what its output and its gradient are made of."""

    valid: Tensor
    log_expected: Tensor
    attention: list[Tensor]  # after each row step but the last: logarithms of scores normalised by the row
    received: list[Tensor]  # after each column step: logarithms of what keys have received by each row
    weights: Tensor
    dropout: Tensor | None
    expected: Tensor  # after the last row (..., columns)

    def excess(self, step: int) -> Tensor:
        """How far keys are above their share after a column step, in the logarithm."""
        return (self.received[step] - self.log_expected).masked_fill(~self.valid, 0.0)

    def potential(self, step: int, tau: Tensor | None) -> Tensor:
        """The column potentials after a number of column steps, row by row."""
        if step == 0:
            return torch.zeros_like(self.attention[0])
        return -self.excess(step - 1) if tau is None else -tau[..., None, None] * self.excess(step - 1)


def sums_before(call: CausalAttentionCall) -> Sums:
    """The sums before the first query of a call."""
    (*lead, _, _), m, steps = call.query.shape, call.key.shape[-2], call.definition().col_steps()
    dtype = working_dtype(call.query.dtype)
    lowest = torch.finfo(dtype).min / 4
    if call.received is None or call.expected is None:
        return Sums(call.query.new_full((*lead, steps, m), lowest, dtype=dtype), call.query.new_zeros(m, dtype=dtype))
    received = call.received.to(dtype).clamp_min(lowest)
    return Sums(received.expand(*lead, steps, m).clone(), call.expected.to(dtype))


def without_masked_tokens(call: CausalAttentionCall) -> CausalAttentionCall:
    """The call with masked tokens set to zero, so that they may hold anything."""
    queries, keys = tokens_that_count(call)
    query, key = zero_masked(call.query, queries), zero_masked(call.key, keys)
    return call.change(query=query, key=key, value=zero_masked(call.value, keys))


def expected_in(valid: Tensor, before: Tensor) -> Tensor:
    """What uniform attention has given each key by each row of a block (..., rows, columns)."""
    shares = valid.to(before.dtype) / valid.sum(-1, keepdim=True).clamp_min(1)
    return before[..., None, :] + shares.cumsum(-2)


def normalise_rows(call: CausalAttentionCall, start: int, stop: int, before: Sums, first_row: int = 0) -> Block:
    """The steps of a block of rows of a call without masked tokens; the sums are those of its visible columns.

    `first_row` is the number of the call's first query for dropout.
    """
    columns = call.visible_columns(stop)
    valid, key = valid_rows(call, start, stop), call.key[..., :columns, :]
    lowest = torch.finfo(key.dtype).min / 4
    scores = (call.query[..., start:stop, :] * call.scale) @ key.mT
    if call.l2:  # |q|² shifts whole rows, which no weight depends on
        scores = scores - (0.5 * call.scale) * key.square().sum(-1)[..., None, :]
    if call.bias is not None:
        bias = part_of(call.bias, start, stop, columns)
        scores = scores + torch.where(valid, bias.to(scores.dtype), 0.0)
    scores = shifted(scores.masked_fill(~valid, -torch.inf), lowest)
    expected = expected_in(valid, before.expected)
    log_expected = expected.clamp_min(torch.finfo(scores.dtype).tiny).log()
    g, rows, sums = torch.zeros_like(scores), [], []
    for received in before.received.unbind(-2):
        attention = (scores - (scores + g).logsumexp(-1, keepdim=True)).masked_fill(~valid, lowest)
        received = torch.logaddexp(received[..., None, :], attention.logcumsumexp(-2))
        g = (log_expected - received).masked_fill(~valid, 0.0)
        g = g if call.tau is None else call.tau[..., None, None] * g
        rows.append(attention)
        sums.append(received)
    weights = (scores + g).softmax(-1).masked_fill(~valid, 0.0)
    dropout = None if call.seed is None else _dropout(call, first_row + start, weights)
    return Block(valid, log_expected, rows, sums, weights, dropout, expected[..., -1, :])


def attend_rows(
    call: CausalAttentionCall, start: int, stop: int, before: Sums, first_row: int = 0
) -> tuple[Tensor, Sums]:
    """The output of a block of rows, and the sums after it."""
    block = normalise_rows(call, start, stop, before, first_row)
    weights = block.weights if block.dropout is None else block.weights * block.dropout
    out = zero_masked(weights @ call.value[..., : weights.shape[-1], :], block.valid.any(-1))
    received = [sums[..., -1, :] for sums in block.received]
    return out, Sums(torch.stack(received, -2) if received else before.received, block.expected)


def _dropout(call: CausalAttentionCall, start: int, weights: Tensor) -> Tensor:
    assert call.seed is not None
    *lead, rows, columns = weights.shape
    return dropout_mask(call.seed, call.heads, lead, rows, columns, call.dropout_p, weights, first_row=start)
