"""The steps of the forward pass: row steps and column steps in turn, each of them one pass over the visible tiles.

A row step has one program per block of rows. The column potentials of its tiles differ by row; each tile computes them
from the table of sums at the start of its block. A column step has one program per block of columns, which walks down
the rows and writes that table.
"""

import triton
import triton.language as tl

from sinkformers.kernels.triton.causal.tiles import (
    column_step_tile,
    columns_in_sight,
    first_block,
    row_potential,
    row_shift,
)
from sinkformers.kernels.triton.dropout import is_kept
from sinkformers.kernels.triton.forward import fold, relaxation, vector
from sinkformers.kernels.triton.operands import block, score_tile, store_tokens, tokens, valid_lines


@triton.jit
def store_sums(rows, head, n_rows, half, i, n, row, top, total, FIRST: tl.constexpr):
    """Write the sums of a row step. Those of the first are relative to the maxima, which all later steps subtract."""
    top = tl.where(row, top, 0.0)
    at = rows + head.to(tl.int64) * (2 * n_rows + 1) * n + i
    if FIRST:
        tl.store(at, top, mask=i < n)
        top = tl.zeros_like(top)
    tl.store(at + (2 * half + 1) * n, top, mask=i < n)
    tl.store(at + (2 * half + 2) * n, tl.where(row, total, 1.0), mask=i < n)


@triton.jit(do_not_specialize=["half"])
def causal_row_step(
    query, key, value, mask, sums, n, m, rows, tau, dropout, out, half, n_rows, n_cols, scale, d, e,
    FIRST: tl.constexpr, LAST: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`f = −LSE_j(C + g)`; the last one carries the product of the weights with the values along."""
    head, i = block(n, ROWS)
    number = tl.program_id(0) % tl.cdiv(n, ROWS)
    row = valid_lines(mask.rows, head, i, n)
    q = tokens(query, mask.lead, head, i, row, d, D)
    shift = tl.zeros([ROWS], tl.float32)
    if not FIRST:
        shift = row_shift(rows, head, n_rows, i, n)
    strength = relaxation(tau, head)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, E], tl.float32)
    for start in range(0, columns_in_sight(mask, number, m, ROWS), COLS):
        j = start + tl.arange(0, COLS)
        col = valid_lines(mask.cols, head, j, m)
        k = tokens(key, mask.lead, head, j, col, d, D)
        scores = score_tile(mask, head, i, j, row, col, q, k, shift, scale, L2)
        if not FIRST:
            _, g = column_step_tile(
                sums, rows, scores, head, number, half - 1, i, j, n, m, n_rows, n_cols, strength, ROWS
            )
            scores += g
        weights, rescale, top, total = fold(scores, top, total, 1)
        if LAST:
            if dropout.seed is not None:
                weights = tl.where(is_kept(dropout, head, i, j), weights, 0.0)
            v = tokens(value, mask.lead, head, j, col, e, E)
            summed = summed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    if LAST:
        factor = 1.0 / tl.where(row, total, 1.0)
        if dropout.seed is not None:
            factor *= dropout.scale
        store_tokens(out, head, i, n, row, e, summed * factor[:, None], E)
    else:
        store_sums(rows, head, n_rows, half, i, n, row, top, total, FIRST)


@triton.jit(do_not_specialize=["half"])
def causal_col_step(
    query, key, mask, sums, n, m, rows, before, after, half, n_rows, n_cols, scale, d,
    L2: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`LSE(before, C + f)` down the rows, written at the start of every block and after the last."""
    head, j = block(m, COLS)
    col = valid_lines(mask.cols, head, j, m)
    k = tokens(key, mask.lead, head, j, col, d, D)
    blocks = tl.cdiv(n, ROWS)
    top = vector(before, head, n_cols, half, j, m)
    total = tl.full([COLS], 1.0, tl.float32)
    for number in range(first_block(mask, j, ROWS), blocks):
        at = sums.starts + ((head.to(tl.int64) * blocks + number) * n_cols + half) * m + j
        tl.store(at, top + tl.log(total), mask=j < m)
        i = number * ROWS + tl.arange(0, ROWS)
        row = valid_lines(mask.rows, head, i, n)
        q = tokens(query, mask.lead, head, i, row, d, D)
        scores = score_tile(mask, head, i, j, row, col, q, k, row_shift(rows, head, n_rows, i, n), scale, L2)
        _, _, top, total = fold(scores + row_potential(rows, head, n_rows, half, i, n)[:, None], top, total, 0)
    tl.store(after + (head.to(tl.int64) * n_cols + half) * m + j, top + tl.log(total), mask=j < m)
