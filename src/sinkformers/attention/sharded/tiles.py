"""Scores and weights of some rows of this rank and some columns: no more of them is in memory at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.causal.visible import part_of
from sinkformers.attention.dropout import dropout_mask
from sinkformers.attention.masks import zero_masked
from sinkformers.attention.sharded.call import ShardedCall, Valid, find_valid, some_of, valid_entries
from sinkformers.attention.sharded.shards import SOURCES, Keys, Shard
from sinkformers.core.problem import working_dtype
from sinkformers.core.ranges import SMALLEST_EXPONENT


class RowStep(NamedTuple):
    """Rows normalised: with `x = scores + g` the weights are `exp(x − top)/total`."""

    g: Tensor  # (..., m)
    top: Tensor  # (..., n), the maximum of x; 0 in empty rows
    total: Tensor  # (..., n); 1 in empty rows


class ColStep(NamedTuple):
    """Columns summed: after a row step, `LSE_i(C + f) = log(total) − lift`, where `total` is summed over all ranks.

    The shares of a column's sum are `exp(scores + lift − top)/(row total · total)`. Where `lift` is the `g` of the row
    step they are its weights over `total`, and nothing has to be exponentiated again.
    """

    lift: Tensor  # (..., m)
    total: Tensor  # (..., m); 1 in empty columns
    excess: Tensor  # (..., m), the logarithm of the columns' sums over their target; 0 in empty columns
    is_direct: bool  # whether `lift` is that g


class Tiles:
    """This rank's queries before the keys of all ranks.

    Attributes:
        query: (..., n, d) in the working dtype, times the scale; masked tokens are zero.
        shift: the row maxima of the scores, (..., n), once they are known. Scores are given less them.
    """

    def __init__(self, call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, valid: Valid | None = None):
        self.call, self.dtype = call, working_dtype(query.dtype)
        self.valid = find_valid(call, query) if valid is None else valid
        own = by_kv_head(self.valid.own_cols(call), key, call.lead)
        query, key = zero_masked(query.to(self.dtype), self.valid.rows), zero_masked(key, own)
        value = zero_masked(value, by_kv_head(self.valid.own_cols(call), value, call.lead))
        if call.l2:
            centre = _mean_key(call, key, own)
            query, key = query - by_query_head(centre, query), zero_masked(key.to(self.dtype) - centre, own)
            query = zero_masked(query, self.valid.rows)
        self.query = query * call.scale
        self.keys: Keys = SOURCES[call.kv](call.ranks, call.keys_by_rank, key, value)
        self.key, self.value = key, value
        self.shift: Tensor | None = None

    def vector(self, size: int, fill: float) -> Tensor:
        return self.query.new_full((*self.call.lead, size), fill)

    def blocks(self, shard: Shard) -> list[slice]:
        columns = shard.columns.stop - shard.columns.start
        return self.call.blocks(columns) if columns else []

    def scores(self, rows: slice, shard: Shard) -> Tensor:
        """The scores (..., rows, columns) less the row maxima, where these are known; minus infinity where masked."""
        key = shard.key.to(self.dtype)
        scores = times_keys(self.query[..., rows, :], key)
        if self.call.l2:  # |q|² shifts whole rows, which no weight depends on
            squares = (0.5 * self.call.scale) * key.square().sum(-1)
            scores -= by_query_head(squares[..., None], self.query).mT
        entries = valid_entries(self.call, rows, shard.columns, self.query.device)
        if self.call.masks.bias is not None:
            bias = some_of(self.call.masks.bias, rows, shard.columns).to(self.dtype)
            assert entries is not None
            scores += bias.masked_fill(~entries, 0.0) if bias.shape == entries.shape else torch.where(entries, bias, 0)
        if self.shift is not None:  # finite scores stay finite: a difference beyond the range would read as a mask
            scores -= self.shift[..., rows, None]
            scores.clamp_min_(torch.finfo(self.dtype).min / 4)
        valid = self.valid_entries(rows, shard, entries)
        return scores if valid is None else scores.masked_fill_(~valid, -torch.inf)

    def valid_entries(self, rows: slice, shard: Shard, entries: Tensor | None) -> Tensor | None:
        """Which entries are valid under all masks; None for all."""
        if self.valid.rows is None or self.valid.cols is None:
            return entries
        valid = self.valid.rows[..., rows, None] & self.valid.cols[..., None, shard.columns]
        return valid if entries is None else valid & entries

    def is_masked(self, rows: slice, shard: Shard) -> Tensor | None:
        valid = self.valid_entries(rows, shard, valid_entries(self.call, rows, shard.columns, self.query.device))
        return None if valid is None else ~valid

    def normalised(self, scores: Tensor, step: RowStep, rows: slice, shard: Shard) -> Tensor:
        """The weights after a row step."""
        x = scores + step.g[..., None, shard.columns]
        return exp_(x.sub_(step.top[..., rows, None])).div_(step.total[..., rows, None])

    def shares(self, scores: Tensor, row: RowStep, col: ColStep, rows: slice, shard: Shard) -> Tensor:
        """The shares in the column sums that a column step found."""
        lifted = row._replace(g=col.lift)
        return self.normalised(scores, lifted, rows, shard).div_(col.total[..., None, shard.columns])

    def dropout(self, rows: slice, shard: Shard) -> Tensor | None:
        """The factors of the weights; those of one device, since entries are numbered by their place among all."""
        call = self.call
        if call.dropout_p == 0:
            return None
        seed = torch.tensor(call.seed, device=self.query.device)
        sizes = rows.stop - rows.start, shard.columns.stop - shard.columns.start
        first = {"first_row": call.first_row + rows.start, "first_column": shard.columns.start}
        return dropout_mask(seed, None, call.lead, *sizes, call.dropout_p, self.query, **first)


def exp_(x: Tensor) -> Tensor:
    """The exponential in place, exactly zero where it would be denormal."""
    return torch.threshold_(x, SMALLEST_EXPONENT[x.dtype], -torch.inf).exp_()


def times_keys(rows: Tensor, keys: Tensor) -> Tensor:
    """`rows @ keysᵀ` (..., heads, n, m), for as many or fewer heads of keys."""
    return _grouped(rows, keys) @ keys.mT if rows.dim() < 3 else _ungrouped(_grouped(rows, keys) @ keys.mT, rows)


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """`weights @ values` (..., heads, n, e), for as many or fewer heads of values."""
    return _ungrouped(_grouped(weights, values) @ values, weights)


def sum_rows(weights: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """`weightsᵀ @ rows` (..., m, width), summed over the query heads that share a head of `like`."""
    return _grouped(weights, like).mT @ _grouped(rows, like)


def _grouped(x: Tensor, kv: Tensor) -> Tensor:
    """Rows (..., heads, n, d) of the query heads that share a key head under each other."""
    if x.dim() < 3 or x.shape[-3] == kv.shape[-3]:
        return x
    return x.reshape(*x.shape[:-3], kv.shape[-3], -1, x.shape[-1])


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dim() < 3 else x.reshape(*like.shape[:-1], x.shape[-1])


def by_kv_head(valid: Tensor | None, kv: Tensor, lead: torch.Size) -> Tensor | None:
    """Masks (lead, m) by the heads of keys or values: valid where it is for a query head."""
    if valid is None or kv.shape[:-2] == lead:
        return valid
    return valid.unflatten(-2, (kv.shape[-3], -1)).any(-2)


def by_query_head(x: Tensor, query: Tensor) -> Tensor:
    if x.dim() < 3 or x.shape[-3] == query.shape[-3]:
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


def _mean_key(call: ShardedCall, key: Tensor, valid: Tensor | None) -> Tensor:
    """The mean of all valid keys (..., 1, d), which no distance depends on: an offset would cost precision."""
    dtype = working_dtype(key.dtype)
    total = key.detach().to(dtype).sum(-2, keepdim=True)
    if valid is None:
        count = total.new_full((*total.shape[:-1], 1), key.shape[-2])
    else:
        count = valid.expand(key.shape[:-1]).sum(-1, dtype=dtype)[..., None, None]
    both = call.ranks.add_(torch.cat([total, count], -1).contiguous(), "the mean of the keys")
    return both[..., :-1] / both[..., -1:].clamp_min(1)


def add_part(total: Tensor, rows: slice, columns: slice, part: Tensor) -> None:
    """Add the gradient of some entries to that of a matrix whose sizes are 1 where it repeats."""
    to = part_of(total, rows.start, rows.stop, columns.stop)
    to = to if to.shape[-1] == 1 else to[..., columns.start :]
    to += part.sum_to_size(to.shape)
