"""The gradients of a head in one program that holds a block of rows at a time: all columns, but not all scores.

Three sweeps over the blocks: `dV` and the adjoints of the last potentials; for each column step, the adjoints of the
rows before it and of the columns before those, from one tile; and the gradient of the scores, which goes into `dQ` of
its rows and is added to `dK`, which stays on the chip. Two products of tokens, one for each column step, and four: the
passes over tiles need two for a column step, one program for the rows and one for the columns, and six in place of the
last four.
"""

import triton
import triton.language as tl

from sinkformers.kernels.triton.backward import NEAR
from sinkformers.kernels.triton.dropout import is_kept
from sinkformers.kernels.triton.forward import relaxation, row_potential, row_shift, vector
from sinkformers.kernels.triton.head import head_scores, largest_change, product
from sinkformers.kernels.triton.operands import store_tokens, tokens, valid_lines


@triton.jit
def store_vector(table, head, steps, step, index, count, values):
    """Write row `step` of a table (heads, steps, count)."""
    tl.store(table + (head.to(tl.int64) * steps + step) * count + index, values, mask=index < count)


@triton.jit
def head_backward_in_blocks(
    d_out, query, key, value, out, mask, n, m, f, excess, tau, log_rho, dropout, df, dg, d_query, d_key, d_value,
    d_bias, n_rows, n_cols, scale, d, e,
    NEAR_ONES: tl.constexpr, ROWS_LAST: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, LINES: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """All gradients of one head but that of tau, from the tables that forward wrote, by way of the adjoints `df`
    (heads, row steps + 1, n), behind them that of the output, and `dg` (heads, column steps, m).

    A launch serves the heads whose steps are near the last one, or the others.
    """
    head = tl.program_id(0)
    j = tl.arange(0, COLS)
    col = valid_lines(mask.cols, head, j, m)
    strength, target = relaxation(tau, head), tl.load(log_rho + head)
    g_last = -strength * vector(excess, head, n_cols, n_cols - 1, j, m)
    lines = tl.arange(0, LINES)
    f_lines = row_potential(f, head, n_rows, n_rows - 1, lines, n)
    change = largest_change(f, excess, f_lines, g_last, head, lines, j, n, m, strength, target, n_rows, n_cols)
    if (change <= NEAR) != NEAR_ONES:
        return

    of_values = tl.zeros([COLS, E], tl.float32)
    pulled = tl.zeros([COLS], tl.float32)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        row = valid_lines(mask.rows, head, i, n)
        shift, f_last = row_shift(f, head, n_rows, i, n), row_potential(f, head, n_rows, n_rows - 1, i, n)
        scores = head_scores(query, key, mask, head, i, j, row, col, shift, scale, d, L2, ROWS, COLS, FEATURES)
        weights = tl.exp(scores + f_last[:, None] + g_last[None, :])
        incoming = tokens(d_out, mask.lead, head, i, row, e, E)
        outgoing = tokens(out, mask.lead, head, i, row, e, E)
        adjoint = tl.sum(incoming.to(tl.float32) * outgoing, 1)
        store_vector(df, head, n_rows + 1, n_rows - 1 if ROWS_LAST else n_rows, i, n, adjoint)
        if ROWS_LAST:
            pulled += tl.sum(weights * adjoint[:, None], 0)
        if dropout.seed is not None:
            weights = tl.where(is_kept(dropout, head, i, j), weights, 0.0)
        of_values += tl.dot(tl.trans(weights).to(incoming.dtype), incoming, input_precision="ieee")
    if dropout.seed is not None:
        of_values *= dropout.scale
    store_tokens(d_value, head, j, m, col, e, of_values, E)
    v = tokens(value, mask.lead, head, j, col, e, E)
    d_col = tl.where(col, tl.sum(v.to(tl.float32) * of_values, 1) - pulled, 0.0)

    tl.debug_barrier()  # what one thread has written others read
    for back in range(n_cols):
        half = n_cols - 1 - back
        store_vector(dg, head, n_cols, half, j, m, d_col)
        away = vector(excess, head, n_cols, half, j, m) + target
        before = -strength * vector(excess, head, n_cols, half - 1, j, m)
        pull = strength * d_col
        if NEAR_ONES:
            pull *= tl.exp(-away - g_last)
        # Where columns came last, the adjoint of the last row potentials holds the output's part.
        own = tl.where(half == n_rows - 1, n_rows, -1)
        pulled = tl.zeros([COLS], tl.float32)
        for start in range(0, n, ROWS):
            i = start + tl.arange(0, ROWS)
            row = valid_lines(mask.rows, head, i, n)
            shift, f_half = row_shift(f, head, n_rows, i, n), row_potential(f, head, n_rows, half, i, n)
            scores = head_scores(query, key, mask, head, i, j, row, col, shift, scale, d, L2, ROWS, COLS, FEATURES)
            d_row = vector(df, head, n_rows + 1, own, i, n)
            if NEAR_ONES:
                f_last = row_potential(f, head, n_rows, n_rows - 1, i, n)
                across = tl.exp(f_half - f_last)
                weights = tl.exp(scores + f_last[:, None] + g_last[None, :])
                d_row = tl.where(row, d_row - across * tl.sum(weights * pull[None, :], 1), 0.0)
                pulled -= tl.sum(weights * (across * d_row)[:, None], 0)
            else:
                weights = tl.exp(scores + f_half[:, None] - away[None, :])
                d_row = tl.where(row, d_row - tl.sum(weights * pull[None, :], 1), 0.0)
                weights = tl.exp(scores + f_half[:, None] + before[None, :])
                pulled -= tl.sum(weights * d_row[:, None], 0)
            store_vector(df, head, n_rows + 1, half, i, n, d_row)
        if NEAR_ONES:
            pulled *= tl.exp(before - g_last)
        d_col = tl.where(col, pulled, 0.0)

    tl.debug_barrier()
    of_keys = tl.zeros([COLS, D], tl.float32)
    column = tl.zeros([COLS], tl.float32)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        row = valid_lines(mask.rows, head, i, n)
        shift, f_last = row_shift(f, head, n_rows, i, n), row_potential(f, head, n_rows, n_rows - 1, i, n)
        scores = head_scores(query, key, mask, head, i, j, row, col, shift, scale, d, L2, ROWS, COLS, FEATURES)
        weights = tl.exp(scores + f_last[:, None] + g_last[None, :])
        inside = product(d_out, value, mask.lead, head, i, j, row, col, e, ROWS, COLS, FEATURES)
        if dropout.seed is not None:
            inside = tl.where(is_kept(dropout, head, i, j), inside * dropout.scale, 0.0)
        inside = tl.where(weights == 0.0, 0.0, inside)  # which no value that is NaN must reach where masked
        if not NEAR_ONES:
            beside = tl.zeros([ROWS, COLS], tl.float32)
        for half in range(n_rows):
            f_half, d_row = row_potential(f, head, n_rows, half, i, n), vector(df, head, n_rows + 1, half, i, n)
            before = -strength * vector(excess, head, n_cols, half - 1, j, m)
            if NEAR_ONES:
                inside -= (tl.exp(f_half - f_last) * d_row)[:, None] * tl.exp(before - g_last)[None, :]
            else:
                beside += tl.exp(scores + f_half[:, None] + before[None, :]) * d_row[:, None]
        for half in range(n_cols):
            f_half, pull = row_potential(f, head, n_rows, half, i, n), strength * vector(dg, head, n_cols, half, j, m)
            away = vector(excess, head, n_cols, half, j, m) + target
            if NEAR_ONES:
                inside -= tl.exp(f_half - f_last)[:, None] * (tl.exp(-away - g_last) * pull)[None, :]
            else:
                beside += tl.exp(scores + f_half[:, None] - away[None, :]) * pull[None, :]
        grad = weights * inside
        if not NEAR_ONES:
            grad -= beside
        if d_bias is not None:
            at = d_bias + (head.to(tl.int64) * n + i)[:, None] * m + j[None, :]
            tl.store(at, grad, mask=(i < n)[:, None] & (j < m)[None, :])
        for first in range(0, d, FEATURES):
            k = tokens(key, mask.lead, head, j, col, d, FEATURES, first)
            summed = tl.dot(grad.to(k.dtype), k, input_precision="ieee")
            store_tokens(d_query, head, i, n, row, d, summed * scale, FEATURES, first)
        q = tokens(query, mask.lead, head, i, row, d, D)
        of_keys += tl.dot(tl.trans(grad).to(q.dtype), q, input_precision="ieee")
        if L2:
            column += tl.sum(grad, 0)
    if L2:
        of_keys -= column[:, None] * tokens(key, mask.lead, head, j, col, d, D).to(tl.float32)
    store_tokens(d_key, head, j, m, col, d, of_keys * scale, D)
