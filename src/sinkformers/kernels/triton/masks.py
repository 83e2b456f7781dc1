"""The combined masks of an attention call: per entry where needed, and always per row and column.

Masking equals deletion: a row or column is valid if one entry of it is, and the target of the column sums, rows over
columns, counts valid rows and columns only.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sinkformers.kernels.triton.forward import find_valid_lines
from sinkformers.kernels.triton.operands import Mask, counted, strided


class Shared(NamedTuple):
    """What the passes of one call share."""

    mask: Mask
    n: int
    m: int
    log_rho: Tensor  # (heads,): log of valid rows over valid columns; empty where every entry has its own target
    tau: Tensor | None  # (heads,)
    heads: int
    n_rows: int  # row steps
    n_cols: int  # column steps

    def over_rows(self, meta: dict[str, Any]) -> tuple[int]:
        """A grid of row blocks. All heads stand in the first axis: the others end at 65,535."""
        return (self.heads * triton.cdiv(self.n, meta["ROWS"]),)

    def over_heads(self, meta: dict[str, Any]) -> tuple[int]:
        return (self.heads,)

    def over_cols(self, meta: dict[str, Any]) -> tuple[int]:
        return (self.heads * triton.cdiv(self.m, meta["COLS"]),)


def share(call: Any, masked_bias: float) -> Shared:
    """The masks as they are given, in the form that kernels take, and no target of the columns."""
    query, key, tau = call.query, call.key, call.tau
    lead, n, m = query.shape[:-2], query.shape[-2], key.shape[-2]
    heads = math.prod(lead)
    rows, cols = _from_token_masks(call.queries, call.keys, lead, n, m)
    mask = Mask(strided(call.bias, lead), strided(call.entries, lead), rows, cols, masked_bias, counted(lead))
    tau = None if tau is None else tau.expand(lead).reshape(heads).float().resolve_neg().contiguous()
    no_target = query.new_empty(0, dtype=torch.float32)
    return Shared(mask, n, m, no_target, tau, heads, (call.n_iters + 1) // 2, call.n_iters // 2)


def prepare(call: Any, masked_bias: float) -> Shared:
    """Combine the masks: vectors, and where one of them is a matrix, a pass over it for rows and one for columns."""
    shared, query = share(call, masked_bias), call.query
    mask, heads, n, m = shared.mask, shared.heads, shared.n, shared.m
    if call.bias is not None or call.entries is not None:
        mask = mask._replace(
            rows=_valid_lines(mask, heads, n, m, query), cols=_valid_lines(_transposed(mask), heads, m, n, query)
        )
    if mask.rows is None:
        log_rho = query.new_full((heads,), math.log(n / m), dtype=torch.float32)
    else:
        n_live, m_live = (lines.sum(-1).clamp_min(1) for lines in (mask.rows, mask.cols))
        log_rho = (n_live / m_live).log()
    return shared._replace(mask=mask, log_rho=log_rho)


def _from_token_masks(
    queries: Tensor | None, keys: Tensor | None, lead: torch.Size, n: int, m: int
) -> tuple[Tensor | None, Tensor | None]:
    """The rows (heads, n) and columns (heads, m) that token masks leave: none of either without one of the other."""
    if queries is None and keys is None:
        return None, None
    all_valid = torch.ones(1, dtype=torch.bool, device=(keys if queries is None else queries).device)
    rows = (all_valid if queries is None else queries).expand(*lead, n)
    cols = (all_valid if keys is None else keys).expand(*lead, m)
    rows, cols = rows & cols.any(-1, keepdim=True), cols & rows.any(-1, keepdim=True)
    return rows.reshape(-1, n).contiguous(), cols.reshape(-1, m).contiguous()


def _valid_lines(mask: Mask, heads: int, n: int, m: int, like: Tensor) -> Tensor:
    left = like.new_empty(heads, n, dtype=torch.bool)
    grid = (heads * triton.cdiv(n, 32),)
    find_valid_lines[grid](mask, n, m, left, ROWS=32, COLS=64, num_warps=4, enable_fp_fusion=True)
    return left


def _transposed(mask: Mask) -> Mask:
    bias, entries = (x._replace(row=x.col, col=x.row) for x in (mask.bias, mask.entries))
    return mask._replace(bias=bias, entries=entries, rows=mask.cols, cols=mask.rows)
