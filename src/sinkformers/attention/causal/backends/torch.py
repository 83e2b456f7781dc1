"""Causal attention in torch's own operations, block by block: no more than a few rows of weights at a time."""

import torch
from torch import Tensor

from sinkformers.attention.causal.call import CausalAttentionCall, CausalAttentionResult
from sinkformers.attention.causal.row_gradients import row_gradients
from sinkformers.attention.causal.rows import Sums, attend_rows, expected_in, sums_before, without_masked_tokens
from sinkformers.attention.causal.visible import valid_rows
from sinkformers.core.backend import Backend

ROWS = 128


class Torch(Backend):
    name = "torch"

    def why_not(self, call: CausalAttentionCall) -> str | None:
        return None

    def rows_per_block(self, call: CausalAttentionCall) -> int:
        return ROWS

    def forward(self, call: CausalAttentionCall) -> CausalAttentionResult:
        return attend(call.in_working_dtype())

    def backward(
        self,
        call: CausalAttentionCall,
        result: CausalAttentionResult,
        d_output: Tensor,
        needed: dict[str, bool],
    ) -> dict[str, Tensor | None]:
        call = call.in_working_dtype()
        return gradients(call, result.starts, d_output.to(call.query.dtype), needs_bias=needed["bias"])


def attend(call: CausalAttentionCall, first_row: int = 0) -> CausalAttentionResult:
    """The result of a call in its working dtype, by a pass over the blocks that carries the sums along.

    `first_row` is the number of the first query where others came before, which dropout depends on.
    """
    call = without_masked_tokens(call)
    *lead, _, _ = call.query.shape
    sums, outputs, starts = sums_before(call), [], []
    for start, stop in call.blocks():
        columns = call.visible_columns(stop)
        starts.append(sums.received)
        out, after = attend_rows(call, start, stop, sums.first(columns), first_row)
        outputs.append(out)
        sums = _continued(sums, after, columns)
    expected = sums.expected.expand(*lead, sums.expected.shape[-1])
    safe = torch.ones(lead, dtype=torch.bool, device=call.query.device)
    return CausalAttentionResult(torch.cat(outputs, -2), sums.received, expected, torch.stack(starts, -3), safe)


def gradients(
    call: CausalAttentionCall, starts: Tensor, d_out: Tensor, *, needs_bias: bool
) -> dict[str, Tensor | None]:
    """The exact gradients of a call whose sums go nowhere."""
    return walk_back(call, starts, d_out, torch.zeros_like(starts[..., 0, :, :]), needs_bias=needs_bias)[0]


def walk_back(
    call: CausalAttentionCall, starts: Tensor, d_out: Tensor, d_sums: Tensor, *, needs_bias: bool, first_row: int = 0
) -> tuple[dict[str, Tensor | None], Tensor]:
    """The exact gradients, by a pass over the blocks in reverse that carries the gradient of the sums along.

    `d_sums` (..., column steps, m) is that of the sums after the last query; that of the sums before the first one is
    returned too.
    """
    call, d_sums = without_masked_tokens(call), d_sums.clone()
    (*lead, n, _), m = call.query.shape, call.key.shape[-2]
    d_query, d_key, d_value = (torch.zeros_like(x) for x in (call.query, call.key, call.value))
    d_bias = call.query.new_zeros(*lead, n, m) if needs_bias and call.bias is not None else None
    d_tau = None if call.tau is None else torch.zeros_like(call.tau)
    every_expected, expected = [], sums_before(call).expected
    for start, stop in call.blocks():
        every_expected.append(expected)
        columns = call.visible_columns(stop)
        ends = expected_in(valid_rows(call, start, stop), expected[..., :columns])[..., -1, :]
        expected = _joined(ends, expected, columns)
    for index, (start, stop) in reversed(list(enumerate(call.blocks()))):
        columns = call.visible_columns(stop)
        before = Sums(starts[..., index, :, :], every_expected[index]).first(columns)
        found = row_gradients(call, start, stop, before, d_out[..., start:stop, :], d_sums[..., :columns], first_row)
        d_query[..., start:stop, :] = found.query
        d_key[..., :columns, :] += found.key
        d_value[..., :columns, :] += found.value
        d_sums[..., :columns] = found.received
        if d_tau is not None and found.tau is not None:
            d_tau += found.tau
        if d_bias is not None:
            d_bias[..., start:stop, :columns] = found.scores
    return {"query": d_query, "key": d_key, "value": d_value, "bias": d_bias, "tau": d_tau}, d_sums


def _continued(sums: Sums, after: Sums, columns: int) -> Sums:
    received = torch.cat([after.received, sums.received[..., columns:]], -1)
    return Sums(received, _joined(after.expected, sums.expected, columns))


def _joined(after: Tensor, before: Tensor, columns: int) -> Tensor:
    """The first columns of one vector, and the rest of the other, which may have fewer leading axes."""
    rest = before[..., columns:]
    return torch.cat([after, rest.expand(*after.shape[:-1], rest.shape[-1])], -1)
