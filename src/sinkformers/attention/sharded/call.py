"""A call of attention whose tokens are sharded over ranks, and which of all tokens are valid."""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.causal.visible import part_of
from sinkformers.attention.masks import Masks
from sinkformers.core.definition import Definition
from sinkformers.core.problem import working_dtype
from sinkformers.core.ranges import masked_bias
from sinkformers.distributed import Ranks

TILE = 2**22
"""The most scores that are in memory at a time, as long as a block has a few rows."""
FEWEST_ROWS = 16


class ShardedCall(NamedTuple):
    """What all ranks agree on, and this rank's masks.

    Masks have the rank of the scores, as in `AttentionCall`; `bias` and `entries` have this rank's rows and all
    columns, `queries` and `keys` are those of this rank.
    """

    ranks: Ranks
    kv: str
    queries_by_rank: list[int]
    keys_by_rank: list[int]
    masks: Masks
    any_token_masks: bool  # on any rank
    any_entry_masks: bool
    triangle: bool  # no query sees a later key, in the order of all tokens
    lead: torch.Size  # the leading axes of the query
    n_iters: int | float
    implicit: bool
    scale: float
    l2: bool
    dropout_p: float
    seed: int
    tol: float  # of the limit, as max_products
    max_products: int

    def definition(self) -> Definition:
        assert isinstance(self.n_iters, int)
        return Definition(self.n_iters)

    def with_masks(self, *masks: Tensor | None) -> "ShardedCall":
        """The call with other masks: autograd saves those of the user, and the rest is kept beside them."""
        return self._replace(masks=Masks(*masks))

    @property
    def n(self) -> int:
        """The queries of this rank."""
        return self.queries_by_rank[self.ranks.rank]

    @property
    def m(self) -> int:
        """The keys of all ranks."""
        return sum(self.keys_by_rank)

    @property
    def first_row(self) -> int:
        return sum(self.queries_by_rank[: self.ranks.rank])

    @property
    def own_columns(self) -> slice:
        start = sum(self.keys_by_rank[: self.ranks.rank])
        return slice(start, start + self.keys_by_rank[self.ranks.rank])

    def blocks(self, columns: int) -> list[slice]:
        """Blocks of this rank's rows, small enough that their scores with so many columns are."""
        rows = max(FEWEST_ROWS, TILE // max(1, self.lead.numel() * columns))
        return [slice(start, min(self.n, start + rows)) for start in range(0, self.n, rows)]


class Valid(NamedTuple):
    """The valid tokens: those with a valid entry. None where all are."""

    rows: Tensor | None  # (..., n) of this rank
    cols: Tensor | None  # (..., m) of all ranks
    log_ratio: Tensor  # (lead, 1): the logarithm of valid queries over valid keys, what columns aim at

    def own_cols(self, call: ShardedCall) -> Tensor | None:
        return None if self.cols is None else self.cols[..., call.own_columns]


def find_valid(call: ShardedCall, like: Tensor) -> Valid:
    """The valid tokens of a call, found together by all ranks."""
    dtype, m = working_dtype(like.dtype), call.m
    if not (call.any_token_masks or call.any_entry_masks or call.triangle):
        ratio = sum(call.queries_by_rank) / max(1, m)
        return Valid(None, None, like.new_full((*call.lead, 1), max(1e-30, ratio), dtype=dtype).log())
    every = torch.ones((), dtype=torch.bool, device=like.device)
    rows = (every if call.masks.queries is None else call.masks.queries).expand(*call.lead, call.n)
    keys = (every if call.masks.keys is None else call.masks.keys).expand(
        *call.lead, call.keys_by_rank[call.ranks.rank]
    )
    cols = call.ranks.gather(keys[..., None].to(torch.uint8), call.keys_by_rank, "key masks")[..., 0].bool()
    if call.any_entry_masks or call.triangle:
        rows, cols = _with_entries(call, rows, cols)
    else:
        rows, cols = rows & cols.any(-1, keepdim=True), cols & _any_row(call, rows)
    count = rows.sum(-1, keepdim=True, dtype=torch.int64).contiguous()
    count = call.ranks.add_(count, "the numbers of valid queries")
    ratio = count.clamp_min(1).to(dtype) / cols.sum(-1, keepdim=True).clamp_min(1)
    return Valid(rows, cols, ratio.log())


def _any_row(call: ShardedCall, rows: Tensor) -> Tensor:
    found = rows.any(-1, keepdim=True).to(torch.uint8).contiguous()
    return call.ranks.maximum_(found, "whether a query is valid").bool()


def _with_entries(call: ShardedCall, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows and columns have a valid entry under all masks."""
    valid_rows, seen = torch.zeros_like(rows, memory_format=torch.contiguous_format), torch.zeros_like(cols)
    for block in call.blocks(call.m):
        valid = rows[..., block, None] & cols[..., None, :]
        entries = valid_entries(call, block, slice(0, call.m), rows.device)
        valid = valid if entries is None else valid & entries
        valid_rows[..., block] = valid.any(-1)
        seen |= valid.any(-2)
    seen = call.ranks.maximum_(seen.to(torch.uint8).contiguous(), "which keys are seen").bool()
    return valid_rows, seen


def valid_entries(call: ShardedCall, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
    """Which entries the masks of entries leave in some rows and columns; None for all."""
    valid = None
    if call.triangle:
        row = torch.arange(rows.start, rows.stop, device=device) + call.first_row
        valid = row[:, None] >= torch.arange(columns.start, columns.stop, device=device)
    if call.masks.entries is not None:
        entries = some_of(call.masks.entries, rows, columns)
        valid = entries if valid is None else valid & entries
    if call.masks.bias is not None:
        bias = some_of(call.masks.bias, rows, columns).detach()
        unmasked = ~(bias <= masked_bias(bias.dtype))
        valid = unmasked if valid is None else valid & unmasked
    return valid


def some_of(matrix: Tensor, rows: slice, columns: slice) -> Tensor:
    """Some rows and columns of a matrix whose sizes are 1 where it repeats."""
    part = part_of(matrix, rows.start, rows.stop, columns.stop)
    return part if part.shape[-1] == 1 else part[..., columns.start :]
