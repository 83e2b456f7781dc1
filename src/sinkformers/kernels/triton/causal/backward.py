"""The exact gradient of the steps taken, walking back over the same tiles.

With G the gradient of the exponents of a row step (for the last one `P∘(D∘(dO Vᵀ) − rowsum(dO∘O))`), the column step
before it has adjoint −τG of what keys have received. That spreads over the rows above in proportion to their parts,
down to H of each entry: a running sum from the last row to the first. One pass per block of columns carries it along
and writes what each block is pulled with by later ones; one pass per block of rows then sums H along the keys, which is
the adjoint of the row step before: its G is `−rowsum(H)` times its weights. The gradient of the scores is the sum of
all G and H, made tile by tile, and goes straight into the products with the tokens.
"""

import triton
import triton.language as tl

from sinkformers.kernels.triton.causal.tiles import (
    column_step_tile,
    columns_in_sight,
    expected_tile,
    first_block,
    potential_tile,
    received_tile,
    row_potential,
    row_shift,
    row_sum,
    spread_tile,
    start_of,
)
from sinkformers.kernels.triton.dropout import is_kept
from sinkformers.kernels.triton.forward import relaxation, vector
from sinkformers.kernels.triton.operands import block, score_tile, store_tokens, tokens, valid_lines


@triton.jit
def load_rows(d_out, query, mask, head, i, n, d, e, D: tl.constexpr, E: tl.constexpr):
    """Which rows see a key, their queries, and the gradients of their outputs."""
    row = valid_lines(mask.rows, head, i, n)
    return row, tokens(query, mask.lead, head, i, row, d, D), tokens(d_out, mask.lead, head, i, row, e, E)


@triton.jit
def load_cols(key, value, mask, head, j, m, d, e, D: tl.constexpr, E: tl.constexpr):
    """Which columns a row sees, their keys and their values."""
    col = valid_lines(mask.cols, head, j, m)
    return col, tokens(key, mask.lead, head, j, col, d, D), tokens(value, mask.lead, head, j, col, e, E)


@triton.jit
def through_values(incoming, v, dropout, head, i, j):
    """A tile of the gradient of the weights."""
    inside = tl.dot(incoming, tl.trans(v), input_precision="ieee")
    if dropout.seed is not None:
        inside = tl.where(is_kept(dropout, head, i, j), inside * dropout.scale, 0.0)
    return inside


@triton.jit
def step_weights(scores, g, rows, df, head, half, i, n, n_rows):
    """The weights of row step `half`, and the part of their exponents' gradient that its row sums have."""
    top, total = row_sum(rows, head, n_rows, half, i, n)
    # Potentials may be large; relative to the largest exponent, what is left to round is small where weights are not.
    weights = tl.exp(scores + g - top[:, None]) / total[:, None]
    return weights, -weights * vector(df, head, n_rows, half, i, n)[:, None]


@triton.jit(do_not_specialize=["half"])
def sums_adjoint(
    d_out, query, key, value, mask, sums, n, m, rows, tau, dropout, df, pulls, d_value,
    half, n_rows, n_cols, scale, d, e,
    LAST: tl.constexpr, HAS_COLS: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Walk back over column step `half`, up the columns: what each block is pulled with. LAST: `dV = Pᵀ dO`."""
    head, j = block(m, COLS)
    blocks = tl.cdiv(n, ROWS)
    col, k, v = load_cols(key, value, mask, head, j, m, d, e, D, E)
    strength = relaxation(tau, head)
    summed = tl.zeros([COLS, E], tl.float32)
    after = tl.zeros([COLS], tl.float32)
    for back in range(blocks - first_block(mask, j, ROWS)):
        number = blocks - 1 - back
        i = number * ROWS + tl.arange(0, ROWS)
        row, q, incoming = load_rows(d_out, query, mask, head, i, n, d, e, D, E)
        scores = score_tile(mask, head, i, j, row, col, q, k, row_shift(rows, head, n_rows, i, n), scale, L2)
        g = tl.zeros_like(scores)
        received = g
        if HAS_COLS:
            received, g = column_step_tile(
                sums, rows, scores, head, number, half, i, j, n, m, n_rows, n_cols, strength, ROWS
            )
        weights, grad = step_weights(scores, g, rows, df, head, half + 1, i, n, n_rows)
        if LAST:
            if HAS_COLS:
                grad += weights * through_values(incoming, v, dropout, head, i, j)
            if dropout.seed is not None:
                weights = tl.where(is_kept(dropout, head, i, j), weights, 0.0)
            summed += tl.dot(tl.trans(weights).to(incoming.dtype), incoming, input_precision="ieee")
        if HAS_COLS:
            tl.store(pulls + ((head.to(tl.int64) * blocks + number) * n_cols + half) * m + j, after, mask=j < m)
            start = start_of(sums, head, number, half, n_cols, j, n, m, ROWS)
            own = row_potential(rows, head, n_rows, half, i, n)
            _, after = spread_tile(scores, own, received, start, -strength * grad, after, ROWS)
    if LAST:
        if dropout.seed is not None:
            summed *= dropout.scale
        store_tokens(d_value, head, j, m, col, e, summed, E)


@triton.jit(do_not_specialize=["half"])
def causal_row_adjoint(
    d_out, query, key, value, mask, sums, n, m, rows, tau, dropout, df, pulls, half, n_rows, n_cols, scale, d, e,
    LAST: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Walk back over column step `half`, along the rows: `df = rowsum(H)`."""
    head, i = block(n, ROWS)
    blocks = tl.cdiv(n, ROWS)
    number = tl.program_id(0) % blocks
    row, q, incoming = load_rows(d_out, query, mask, head, i, n, d, e, D, E)
    shift = row_shift(rows, head, n_rows, i, n)
    strength = relaxation(tau, head)
    pulled = tl.zeros([ROWS], tl.float32)
    for first in range(0, columns_in_sight(mask, number, m, ROWS), COLS):
        j = first + tl.arange(0, COLS)
        col, k, v = load_cols(key, value, mask, head, j, m, d, e, D, E)
        scores = score_tile(mask, head, i, j, row, col, q, k, shift, scale, L2)
        received, g = column_step_tile(
            sums, rows, scores, head, number, half, i, j, n, m, n_rows, n_cols, strength, ROWS
        )
        weights, grad = step_weights(scores, g, rows, df, head, half + 1, i, n, n_rows)
        if LAST:
            grad += weights * through_values(incoming, v, dropout, head, i, j)
        start = start_of(sums, head, number, half, n_cols, j, n, m, ROWS)
        after = vector(pulls, head * blocks + number, n_cols, half, j, m)
        own = row_potential(rows, head, n_rows, half, i, n)
        spread, _ = spread_tile(scores, own, received, start, -strength * grad, after, ROWS)
        pulled += tl.sum(spread, 1)
    tl.store(df + (head.to(tl.int64) * n_rows + half) * n + i, tl.where(row, pulled, 0.0), mask=i < n)


@triton.jit
def causal_score_gradient(
    scores, incoming, v, sums, n, m, rows, tau, dropout, df, pulls, head, number, i, j, n_rows, n_cols,
    ROWS: tl.constexpr
):  # fmt: skip
    """A tile of the gradient of the scores, and the part that its rows have in the gradient of tau."""
    valid = scores != float("-inf")
    strength = relaxation(tau, head)
    expected = expected_tile(sums, valid, head, number, i, j, n, m, ROWS)
    received = expected  # so that no column step leaves all potentials at zero
    if n_cols > 0:
        received = received_tile(sums, rows, scores, head, number, n_cols - 1, i, j, n, m, n_rows, n_cols, ROWS)
    g = potential_tile(expected, received, valid, strength)
    weights, own = step_weights(scores, g, rows, df, head, n_rows - 1, i, n, n_rows)
    own += weights * through_values(incoming, v, dropout, head, i, j)
    grad = own
    d_tau = tl.zeros([ROWS], tl.float32)
    for back in range(n_cols):
        half = n_cols - 1 - back
        start = start_of(sums, head, number, half, n_cols, j, n, m, ROWS)
        after = vector(pulls, head * tl.cdiv(n, ROWS) + number, n_cols, half, j, m)
        f_half = row_potential(rows, head, n_rows, half, i, n)
        spread, _ = spread_tile(scores, f_half, received, start, -strength * own, after, ROWS)
        d_tau += tl.sum(tl.where(valid, own * (expected - received), 0.0), 1)
        received = expected
        if half > 0:
            received = received_tile(sums, rows, scores, head, number, half - 1, i, j, n, m, n_rows, n_cols, ROWS)
        g = potential_tile(expected, received, valid, strength)
        _, own = step_weights(scores, g, rows, df, head, half, i, n, n_rows)
        grad += spread + own
    return tl.where(valid, grad, 0.0), d_tau


@triton.jit
def causal_query_step(
    d_out, query, key, value, mask, sums, n, m, rows, tau, dropout, df, pulls, d_query, d_bias, d_tau,
    n_rows, n_cols, scale, d, e,
    L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`dQ = scale·dC K`, the rows' parts of tau's gradient, and `dC` itself where the bias asks for it."""
    head, i = block(n, ROWS)
    number = tl.program_id(0) % tl.cdiv(n, ROWS)
    row, q, incoming = load_rows(d_out, query, mask, head, i, n, d, e, D, E)
    shift = row_shift(rows, head, n_rows, i, n)
    summed = tl.zeros([ROWS, D], tl.float32)
    of_tau = tl.zeros([ROWS], tl.float32)
    for first in range(0, columns_in_sight(mask, number, m, ROWS), COLS):
        j = first + tl.arange(0, COLS)
        col, k, v = load_cols(key, value, mask, head, j, m, d, e, D, E)
        scores = score_tile(mask, head, i, j, row, col, q, k, shift, scale, L2)
        grad, part = causal_score_gradient(
            scores, incoming, v, sums, n, m, rows, tau, dropout, df, pulls, head, number, i, j, n_rows, n_cols, ROWS
        )  # fmt: skip
        of_tau += part
        if d_bias is not None:
            at = d_bias + (head.to(tl.int64) * n + i)[:, None] * m + j[None, :]
            tl.store(at, grad, mask=(i < n)[:, None] & (j < m)[None, :])
        summed += tl.dot(grad.to(k.dtype), k, input_precision="ieee")
    if d_tau is not None:
        tl.store(d_tau + head.to(tl.int64) * n + i, of_tau, mask=i < n)
    store_tokens(d_query, head, i, n, row, d, summed * scale, D)


@triton.jit
def causal_key_step(
    d_out, query, key, value, mask, sums, n, m, rows, tau, dropout, df, pulls, d_key, n_rows, n_cols, scale, d, e,
    L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`dK = scale·dCᵀ Q`, less `scale·k` for every unit of its column where the cost is L2."""
    head, j = block(m, COLS)
    col, k, v = load_cols(key, value, mask, head, j, m, d, e, D, E)
    summed = tl.zeros([COLS, D], tl.float32)
    column = tl.zeros([COLS], tl.float32)
    for number in range(first_block(mask, j, ROWS), tl.cdiv(n, ROWS)):
        i = number * ROWS + tl.arange(0, ROWS)
        row, q, incoming = load_rows(d_out, query, mask, head, i, n, d, e, D, E)
        scores = score_tile(mask, head, i, j, row, col, q, k, row_shift(rows, head, n_rows, i, n), scale, L2)
        grad, _ = causal_score_gradient(
            scores, incoming, v, sums, n, m, rows, tau, dropout, df, pulls, head, number, i, j, n_rows, n_cols, ROWS
        )  # fmt: skip
        summed += tl.dot(tl.trans(grad).to(q.dtype), q, input_precision="ieee")
        if L2:
            column += tl.sum(grad, 0)
    if L2:
        summed -= column[:, None] * k.to(tl.float32)
    store_tokens(d_key, head, j, m, col, d, summed * scale, D)
