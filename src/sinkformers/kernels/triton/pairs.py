"""A row step and the column step after it in one pass over the scores, where a program holds whole rows.

The weights of the row step are on the chip when its sums are known; their sums down the columns are what the column
step needs, so that neither the product of the tokens nor the exponentials are computed again for it. Each block of rows
writes its share of the columns' sums as logarithms, and a pass over those adds the blocks up, in their order.
"""

import triton
import triton.language as tl

from sinkformers.kernels.triton.backward import NEAR
from sinkformers.kernels.triton.forward import relaxation, row_shift, store_rows, vector
from sinkformers.kernels.triton.head import head_scores
from sinkformers.kernels.triton.operands import block, valid_lines


@triton.jit(do_not_specialize=["half"])
def row_and_column_step(
    query, key, mask, n, m, f, excess, shares, tau, half, n_rows, n_cols, scale, d,
    FIRST: tl.constexpr, L2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """`f = −LSE_j(C + g)`, and of these rows `LSE_i(C + f)`; all columns are in one tile."""
    head, i = block(n, ROWS)
    number = tl.program_id(0) % tl.cdiv(n, ROWS)
    j = tl.arange(0, COLS)
    row, col = valid_lines(mask.rows, head, i, n), valid_lines(mask.cols, head, j, m)
    shift = tl.zeros([ROWS], tl.float32)
    if not FIRST:
        shift = row_shift(f, head, n_rows, i, n)
    g = -relaxation(tau, head) * vector(excess, head, n_cols, half - 1, j, m)
    weights = head_scores(query, key, mask, head, i, j, row, col, shift, scale, d, L2, ROWS, COLS, FEATURES)
    weights += g[None, :]
    top = tl.where(row, tl.max(weights, 1), 0.0)
    weights = tl.exp(weights - top[:, None])
    total = tl.where(row, tl.sum(weights, 1), 1.0)
    store_rows(f, head, n_rows, half, i, n, row, top, total, FIRST)
    share = tl.sum(weights / total[:, None], 0)
    if tl.min(tl.where(col, share, 1.0), 0) >= tl.exp(-NEAR):
        share = tl.log(tl.where(col, share, 1.0)) - g
    else:
        # Weights that underflow may be all that a column has, and a column may have none in these rows.
        scores = head_scores(query, key, mask, head, i, j, row, col, shift, scale, d, L2, ROWS, COLS, FEATURES)
        scores -= (top + tl.log(total))[:, None]
        highest = tl.max(scores, 0)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.sum(tl.exp(scores - level[None, :]), 0)
        share = tl.where(highest == float("-inf"), highest, level + tl.log(tl.where(share == 0.0, 1.0, share)))
    at = shares + (head.to(tl.int64) * tl.cdiv(n, ROWS) + number) * m + j
    tl.store(at, share, mask=j < m)


@triton.jit(do_not_specialize=["half"])
def add_up_columns(shares, mask, excess, log_rho, half, n_cols, blocks, m, COLS: tl.constexpr):
    """`excess = LSE_i(C + f) − log ρ` from the shares of all blocks."""
    head, j = block(m, COLS)
    col = valid_lines(mask.cols, head, j, m)
    top = tl.full([COLS], float("-inf"), tl.float32)
    total = tl.zeros([COLS], tl.float32)
    for number in range(blocks):
        at = shares + (head.to(tl.int64) * blocks + number) * m + j
        share = tl.load(at, mask=col, other=float("-inf"))
        highest = tl.maximum(top, share)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - level) + tl.exp(share - level)
        top = highest
    away = tl.where(col, top + tl.log(tl.where(col, total, 1.0)) - tl.load(log_rho + head), 0.0)
    tl.store(excess + (head.to(tl.int64) * n_cols + half) * m + j, away, mask=j < m)
