"""The masks of a causal call, and what uniform attention under them gives each key."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sinkformers.kernels.triton.causal.tiles import Sums, columns_in_sight, first_block
from sinkformers.kernels.triton.forward import vector
from sinkformers.kernels.triton.masks import Shared, share
from sinkformers.kernels.triton.operands import block, valid_entries, valid_lines


class Prepared(NamedTuple):
    """What the passes of one causal call share."""

    shared: Shared
    sums: Sums
    expected: Tensor  # (heads, m), after the last row


def prepare_causal(call: Any, masked_bias: float, starts: Tensor, sizes: dict[str, Any]) -> Prepared:
    """Two passes over the masks: how many keys each row sees, then what each key is given, block by block."""
    (*lead, n, _), m = call.query.shape, call.key.shape[-2]
    shared, like = share(call, masked_bias), starts
    mask = shared.mask._replace(behind=n - m if call.triangle else None)
    uniform = like.new_empty(shared.heads, n)
    count_keys[shared.over_rows](mask, n, m, uniform, **sizes)
    mask = mask._replace(rows=uniform > 0)
    before = like.new_zeros(1) if call.expected is None else call.expected
    before = before.to(like).expand(*lead, m).reshape(shared.heads, m).contiguous()
    expected = like.new_empty(shared.heads, triton.cdiv(n, sizes["ROWS"]), m)
    after, seen = torch.empty_like(before), torch.empty_like(before, dtype=torch.bool)
    give_uniformly[shared.over_cols](mask, n, m, uniform, before, expected, after, seen, **sizes)
    mask = mask._replace(cols=seen)
    return Prepared(shared._replace(mask=mask), Sums(starts, expected, uniform), after)


def received_before(call: Any, heads: int, like: Tensor) -> Tensor:
    """What keys have received from earlier queries (heads, column steps, m), as logarithms."""
    lead, m, steps = call.query.shape[:-2], call.key.shape[-2], call.n_iters // 2
    lowest = torch.finfo(like.dtype).min / 4
    if call.received is None:
        return like.new_full((heads, steps, m), lowest)
    return call.received.to(like).clamp_min(lowest).expand(*lead, steps, m).reshape(heads, steps, m).contiguous()


@triton.jit
def count_keys(mask, n, m, uniform, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The weight 1/count that uniform attention gives each key that a row sees."""
    head, i = block(n, ROWS)
    row = valid_lines(mask.rows, head, i, n)
    count = tl.zeros([ROWS], tl.int32)
    for start in range(0, columns_in_sight(mask, tl.program_id(0) % tl.cdiv(n, ROWS), m, ROWS), COLS):
        j = start + tl.arange(0, COLS)
        col = valid_lines(mask.cols, head, j, m)
        valid, _ = valid_entries(mask, head, i, j, row, col)
        count += tl.sum(valid.to(tl.int32), 1)
    weight = tl.where(count == 0, 0.0, 1.0 / tl.maximum(count, 1).to(tl.float32))
    tl.store(uniform + head.to(tl.int64) * n + i, weight, mask=i < n)


@triton.jit
def give_uniformly(mask, n, m, uniform, before, expected, after, seen, ROWS: tl.constexpr, COLS: tl.constexpr):
    """What uniform attention has given each key at the start of each block, and which keys a row sees at all."""
    head, j = block(m, COLS)
    col = valid_lines(mask.cols, head, j, m)
    blocks = tl.cdiv(n, ROWS)
    given = vector(before, head, 1, 0, j, m)
    rest = tl.zeros([COLS], tl.float32)
    found = tl.zeros([COLS], tl.int32)
    for number in range(first_block(mask, j, ROWS), blocks):
        i = number * ROWS + tl.arange(0, ROWS)
        row = valid_lines(mask.rows, head, i, n)
        valid, _ = valid_entries(mask, head, i, j, row, col)
        tl.store(expected + (head.to(tl.int64) * blocks + number) * m + j, given, mask=j < m)
        # Hundreds of blocks give a thousandth each: what rounding loses of one is added to the next.
        own = tl.sum(tl.where(valid, vector(uniform, head, 1, 0, i, n)[:, None], 0.0), 0) + rest
        total = given + own
        rest = own - (total - given)
        given = total
        found = tl.maximum(found, tl.max(valid.to(tl.int32), 0))
    tl.store(after + head.to(tl.int64) * m + j, given, mask=j < m)
    tl.store(seen + head.to(tl.int64) * m + j, found != 0, mask=j < m)
