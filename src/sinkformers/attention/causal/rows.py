"""Causal attention of a block of rows in torch's own operations, in the log domain, which autograd differentiates."""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.causal.call import CausalAttentionCall
from sinkformers.attention.dropout import dropout_mask
from sinkformers.attention.masks import zero_masked
from sinkformers.core.causal import shifted
from sinkformers.core.ranges import masked_bias


class Sums(NamedTuple):
    """What keys have received in each column step, as logarithms, and what uniform attention would have given them."""

    received: Tensor  # (..., column steps, m)
    expected: Tensor  # (..., m), with the leading axes that masks have

    def first(self, columns: int) -> "Sums":
        return Sums(self.received[..., :columns], self.expected[..., :columns])


def sums_before(call: CausalAttentionCall) -> Sums:
    """The sums before the first query of a call in its working dtype."""
    (*lead, _, _), m, steps = call.query.shape, call.key.shape[-2], call.definition().col_steps()
    lowest = torch.finfo(call.query.dtype).min / 4
    if call.received is None or call.expected is None:
        return Sums(call.query.new_full((*lead, steps, m), lowest), call.query.new_zeros(m))
    received = call.received.to(call.query.dtype).clamp_min(lowest)
    return Sums(received.expand(*lead, steps, m).clone(), call.expected.to(call.query.dtype))


def without_masked_tokens(call: CausalAttentionCall) -> CausalAttentionCall:
    """The call with masked tokens set to zero, so that they may hold anything."""
    queries, keys = call.queries, call.keys
    for mask in (call.entries, None if call.bias is None else _unmasked(call.bias)):
        if mask is not None:
            seen, seeing = mask.any(-2), mask.any(-1)
            keys, queries = seen if keys is None else keys & seen, seeing if queries is None else queries & seeing
    query, key = zero_masked(call.query, queries), zero_masked(call.key, keys)
    return call.change(query=query, key=key, value=zero_masked(call.value, keys))


def valid_rows(call: CausalAttentionCall, start: int, stop: int) -> Tensor:
    """Which of the visible columns each row of a block sees, (..., rows, columns); sizes are 1 where masks repeat."""
    columns = call.visible_columns(stop)
    offset = call.key.shape[-2] - call.query.shape[-2]
    device = call.query.device
    valid = torch.ones(stop - start, columns, dtype=torch.bool, device=device)
    if call.triangle:
        valid = valid.tril(start + offset)
    if call.entries is not None:
        valid = valid & _part(call.entries, start, stop, columns)
    if call.bias is not None:
        valid = valid & _unmasked(_part(call.bias, start, stop, columns))
    if call.queries is not None:
        queries = call.queries if call.queries.shape[-1] == 1 else call.queries[..., start:stop]
        valid = valid & queries[..., None]
    if call.keys is not None:
        keys = call.keys if call.keys.shape[-1] == 1 else call.keys[..., :columns]
        valid = valid & keys[..., None, :]
    return valid


def expected_in(valid: Tensor, before: Tensor) -> Tensor:
    """What uniform attention has given each key by each row of a block (..., rows, columns)."""
    shares = valid.to(before.dtype) / valid.sum(-1, keepdim=True).clamp_min(1)
    return before[..., None, :] + shares.cumsum(-2)


def attend_rows(
    call: CausalAttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    tau: Tensor | None,
    before: Sums,
    start: int,
    valid: Tensor,
) -> tuple[Tensor, Sums]:
    """The output of a block of rows, and the sums after it. Keys, values and sums are those of its visible columns."""
    lowest = torch.finfo(query.dtype).min / 4
    scores = (query * call.scale) @ key.mT
    if call.l2:  # |q|² shifts whole rows, which no weight depends on
        scores = scores - (0.5 * call.scale) * key.square().sum(-1)[..., None, :]
    if bias is not None:
        scores = scores + torch.where(valid, bias.to(scores.dtype), 0.0)
    scores = shifted(scores.masked_fill(~valid, -torch.inf), lowest)
    expected = expected_in(valid, before.expected)
    log_expected = expected.clamp_min(torch.finfo(scores.dtype).tiny).log()
    g, after = torch.zeros_like(scores), []
    for received in before.received.unbind(-2):
        attention = (scores - (scores + g).logsumexp(-1, keepdim=True)).masked_fill(~valid, lowest)
        received = torch.logaddexp(received[..., None, :], attention.logcumsumexp(-2))
        g = (log_expected - received).masked_fill(~valid, 0.0)
        g = g if tau is None else tau[..., None, None] * g
        after.append(received[..., -1, :])
    weights = (scores + g).softmax(-1).masked_fill(~valid, 0.0)
    if call.seed is not None:
        weights = weights * _dropout(call, start, weights)
    out = zero_masked(weights @ value, valid.any(-1))
    received = torch.stack(after, -2) if after else before.received
    return out, Sums(received, expected[..., -1, :])


def bias_rows(bias: Tensor | None, start: int, stop: int, columns: int) -> Tensor | None:
    return None if bias is None else _part(bias, start, stop, columns)


def _part(matrix: Tensor, start: int, stop: int, columns: int) -> Tensor:
    """Some rows and columns of a matrix whose sizes are 1 where it repeats."""
    matrix = matrix if matrix.shape[-2] == 1 else matrix[..., start:stop, :]
    return matrix if matrix.shape[-1] == 1 else matrix[..., :columns]


def _unmasked(bias: Tensor) -> Tensor:
    return ~(bias.detach() <= masked_bias(bias.dtype))  # NaN is valid


def _dropout(call: CausalAttentionCall, start: int, weights: Tensor) -> Tensor:
    assert call.seed is not None
    *lead, rows, columns = weights.shape
    return dropout_mask(call.seed, call.heads, lead, rows, columns, call.dropout_p, weights, first_row=start)
