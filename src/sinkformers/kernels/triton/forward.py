"""The steps of the forward pass: one kernel per normalisation, and none of them writes a matrix.

A row step is a log-sum-exp of `C + g` along keys, a column step one of `C + f` along queries; both compute the scores
again, tile by tile, from the tokens. Programs own what they sum, so that nothing is added atomically and the same
input gives the same bits. The last pass is a row step too, and carries the product with the values along.

The table `f` (heads, row steps + 1, n) opens with the rows' maxima, which the first row step finds. All later passes
take them from the scores before anything else, and the potentials behind them are those of the shifted scores: no
weight depends on the shift, and what is left to round is the size of a logarithm, not that of the largest score.
"""

import triton
import triton.language as tl

from sinkformers.kernels.triton.dropout import is_kept
from sinkformers.kernels.triton.operands import block, score_tile, store_tokens, tokens, valid_entries, valid_lines


@triton.jit
def vector(table, head, steps, step, index, count):
    """Entries of row `step` of a table (heads, steps, count); zero before the first step and beyond the end."""
    at = table + (head.to(tl.int64) * steps + step) * count + index
    return tl.load(at, mask=(index < count) & (tl.zeros_like(index) <= step), other=0.0)


@triton.jit
def row_shift(f, head, n_rows, i, n):
    """The rows' maxima."""
    return vector(f, head, n_rows + 1, 0, i, n)


@triton.jit
def row_potential(f, head, n_rows, half, i, n):
    """The potentials that row step `half` found."""
    return vector(f, head, n_rows + 1, half + 1, i, n)


@triton.jit
def store_rows(f, head, n_rows, half, i, n, row, top, total, FIRST: tl.constexpr):
    """Write the potentials of a row step from its log-sum-exp; the first step splits off the maxima."""
    potential = -tl.log(tl.where(row, total, 1.0))
    at = f + head.to(tl.int64) * (n_rows + 1) * n + i
    if FIRST:
        tl.store(at, tl.where(row, top, 0.0), mask=i < n)
    else:
        potential -= tl.where(row, top, 0.0)
    tl.store(at + (half + 1) * n, potential, mask=i < n)


@triton.jit
def relaxation(tau, head):
    """How far this matrix's columns are pulled towards their target: 1, all the way, without `tau`."""
    strength = 1.0
    if tau is not None:
        strength = tl.load(tau + head)
    return strength


@triton.jit
def fold(x, top, total, AXIS: tl.constexpr):
    """A running log-sum-exp along an axis: the maximum so far, and the sum relative to it."""
    highest = tl.maximum(top, tl.max(x, AXIS))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(x - tl.expand_dims(shift, AXIS))
    rescale = tl.exp(top - shift)
    return weights, rescale, highest, total * rescale + tl.sum(weights, AXIS)


@triton.jit
def find_valid_lines(mask, n, m, left, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which rows (heads, n) have an entry left: the columns' turn comes with the transposed mask."""
    head, i = block(n, ROWS)
    row = valid_lines(mask.rows, head, i, n)
    found = tl.zeros([ROWS], tl.int32)
    for start in range(0, m, COLS):
        j = start + tl.arange(0, COLS)
        col = valid_lines(mask.cols, head, j, m)
        valid, _ = valid_entries(mask, head, i, j, row, col)
        found = tl.maximum(found, tl.max(valid.to(tl.int32), 1))
    tl.store(left + head.to(tl.int64) * n + i, found != 0, mask=i < n)


@triton.jit(do_not_specialize=["half"])
def row_step(
    query, key, mask, n, m, f, excess, tau, half, n_rows, n_cols, scale, d,
    FIRST: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`f = −LSE_j(C + g)`."""
    head, i = block(n, ROWS)
    row = valid_lines(mask.rows, head, i, n)
    q = tokens(query, mask.lead, head, i, row, d, D)
    shift = tl.zeros([ROWS], tl.float32)
    if not FIRST:
        shift = row_shift(f, head, n_rows, i, n)
    strength = relaxation(tau, head)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, m, COLS):
        j = start + tl.arange(0, COLS)
        col = valid_lines(mask.cols, head, j, m)
        k = tokens(key, mask.lead, head, j, col, d, D)
        scores = score_tile(mask, head, i, j, row, col, q, k, shift, scale, L2)
        g = -strength * vector(excess, head, n_cols, half - 1, j, m)
        _, _, top, total = fold(scores + g[None, :], top, total, 1)
    store_rows(f, head, n_rows, half, i, n, row, top, total, FIRST)


@triton.jit(do_not_specialize=["half"])
def col_step(
    query, key, mask, n, m, f, excess, log_rho, half, n_rows, n_cols, scale, d,
    L2: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`excess = LSE_i(C + f) − log ρ`: how far the columns' sums are from their target."""
    head, j = block(m, COLS)
    col = valid_lines(mask.cols, head, j, m)
    k = tokens(key, mask.lead, head, j, col, d, D)
    top = tl.full([COLS], float("-inf"), tl.float32)
    total = tl.zeros([COLS], tl.float32)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        row = valid_lines(mask.rows, head, i, n)
        q = tokens(query, mask.lead, head, i, row, d, D)
        scores = score_tile(mask, head, i, j, row, col, q, k, row_shift(f, head, n_rows, i, n), scale, L2)
        _, _, top, total = fold(scores + row_potential(f, head, n_rows, half, i, n)[:, None], top, total, 0)
    away = tl.where(col, top + tl.log(tl.where(col, total, 1.0)) - tl.load(log_rho + head), 0.0)
    tl.store(excess + (head.to(tl.int64) * n_cols + half) * m + j, away, mask=j < m)


@triton.jit
def last_step(
    query, key, value, mask, n, m, f, excess, tau, dropout, out, n_rows, n_cols, scale, d, e,
    FIRST: tl.constexpr, ROWS_LAST: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`exp(C + f + g) @ V`. Where rows come last, their `f` is what this pass sums up; else it is known."""
    head, i = block(n, ROWS)
    row = valid_lines(mask.rows, head, i, n)
    q = tokens(query, mask.lead, head, i, row, d, D)
    shift = tl.zeros([ROWS], tl.float32)
    if not FIRST:
        shift = row_shift(f, head, n_rows, i, n)
    strength = relaxation(tau, head)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, E], tl.float32)
    for start in range(0, m, COLS):
        j = start + tl.arange(0, COLS)
        col = valid_lines(mask.cols, head, j, m)
        k = tokens(key, mask.lead, head, j, col, d, D)
        v = tokens(value, mask.lead, head, j, col, e, E)
        scores = score_tile(mask, head, i, j, row, col, q, k, shift, scale, L2)
        g = -strength * vector(excess, head, n_cols, n_cols - 1, j, m)
        # Relative to the row's maximum no weight exceeds 1, in half precision either, whatever the column sums are.
        weights, rescale, top, total = fold(scores + g[None, :], top, total, 1)
        if dropout.seed is not None:
            weights = tl.where(is_kept(dropout, head, i, j), weights, 0.0)
        summed = summed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    if ROWS_LAST:
        store_rows(f, head, n_rows, n_rows - 1, i, n, row, top, total, FIRST)
        factor = 1.0 / tl.where(row, total, 1.0)
    else:
        factor = tl.exp(tl.where(row, top, 0.0) + row_potential(f, head, n_rows, n_rows - 1, i, n))
    if dropout.seed is not None:
        factor *= dropout.scale
    store_tokens(out, head, i, n, row, e, summed * factor[:, None], E)
