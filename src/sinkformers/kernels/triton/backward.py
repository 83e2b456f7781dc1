"""The exact gradient of the steps taken, walking back over the same tiles.

The adjoints of the potentials follow from one another by products of a kernel with a vector, each as one pass: rows
`df = −Σ_j K dg`, columns `dg = −Σ_i K df`. Every step then takes a rank-one multiple of its own kernel from the
gradient of the scores,

    dC = P∘(D∘(dO Vᵀ)) − Σ_h exp(C + f_h + g_h)∘(df_h 1ᵀ) − τ Σ_h exp(C + f_h − excess_h − log ρ)∘(1 dg_hᵀ),

which is made tile by tile and goes straight into the products with the tokens.
"""

import triton
import triton.language as tl

from sinkformers.kernels.triton.dropout import is_kept
from sinkformers.kernels.triton.forward import relaxation, row_potential, row_shift, vector
from sinkformers.kernels.triton.operands import block, score_tile, store_tokens, tokens, valid_lines

# A step's kernel is P∘(x yᵀ), x and y the exponentials of its potentials less the last ones, which saves an exponential
# an entry. While x and y stay below e⁴⁰ together this is safe: nothing overflows, and where P has underflown at most
# 1e-38·e⁴⁰ = 2e-21 is lost. Sharp scores alone do not lead beyond: at τ = 1 no step lowers a potential by more than
# log max(n, m), since what it normalises lies between the last sums and a share of them. The drift of very many steps
# does, and so does a column that a small τ lets sink; such a step is exponentiated.
NEAR = tl.constexpr(40.0)


@triton.jit
def output_adjoint(
    d_out, out, mask, n, df, n_rows, e, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """`rowsum(dO∘O)`, the adjoint of the last row potentials."""
    head, i = block(n, ROWS)
    row = valid_lines(mask.rows, head, i, n)
    incoming = tokens(d_out, mask.lead, head, i, row, e, E).to(tl.float32)
    outgoing = tokens(out, mask.lead, head, i, row, e, E).to(tl.float32)
    at = df + (head.to(tl.int64) * n_rows + n_rows - 1) * n + i
    tl.store(at, tl.sum(incoming * outgoing, 1), mask=i < n)


@triton.jit
def value_step(
    d_out, query, key, value, mask, n, m, f, excess, tau, log_rho, dropout, df, dg, d_value,
    n_rows, n_cols, scale, d, e,
    ROWS_LAST: tl.constexpr, HAS_COLS: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`dV = Pᵀ dO`, and from it the adjoint of the last column potentials, a last row step walked back already."""
    head, j = block(m, COLS)
    col = valid_lines(mask.cols, head, j, m)
    k = tokens(key, mask.lead, head, j, col, d, D)
    g = -relaxation(tau, head) * vector(excess, head, n_cols, n_cols - 1, j, m)
    # After a column step a weight may be as large as ρ, which half precision need not hold.
    largest = 0.0 if ROWS_LAST else tl.load(log_rho + head)
    summed = tl.zeros([COLS, E], tl.float32)
    pulled = tl.zeros([COLS], tl.float32)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        row = valid_lines(mask.rows, head, i, n)
        q = tokens(query, mask.lead, head, i, row, d, D)
        incoming = tokens(d_out, mask.lead, head, i, row, e, E)
        scores = score_tile(mask, head, i, j, row, col, q, k, row_shift(f, head, n_rows, i, n), scale, L2)
        f_last = row_potential(f, head, n_rows, n_rows - 1, i, n)
        weights = tl.exp(scores + (f_last - largest)[:, None] + g[None, :])
        if ROWS_LAST:
            pulled += tl.sum(weights * vector(df, head, n_rows, n_rows - 1, i, n)[:, None], 0)
        if dropout.seed is not None:
            weights = tl.where(is_kept(dropout, head, i, j), weights, 0.0)
        summed += tl.dot(tl.trans(weights).to(incoming.dtype), incoming, input_precision="ieee")
    if not ROWS_LAST:
        summed *= tl.exp(largest)
    if dropout.seed is not None:
        summed *= dropout.scale
    summed = tl.where(col[:, None], summed, 0.0)
    store_tokens(d_value, head, j, m, col, e, summed, E)
    if HAS_COLS:
        v = tokens(value, mask.lead, head, j, col, e, E).to(tl.float32)
        adjoint = tl.where(col, tl.sum(v * summed, 1) - pulled, 0.0)
        tl.store(dg + (head.to(tl.int64) * n_cols + n_cols - 1) * m + j, adjoint, mask=j < m)


@triton.jit(do_not_specialize=["half"])
def row_adjoint(
    query, key, mask, n, m, f, excess, tau, log_rho, df, dg, half, n_rows, n_cols, scale, d,
    ADD: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Walk back over column step `half`: `df −= τ Σ_j exp(C + f − excess − log ρ) dg`, from zero unless ADD."""
    head, i = block(n, ROWS)
    row = valid_lines(mask.rows, head, i, n)
    q = tokens(query, mask.lead, head, i, row, d, D)
    shift = row_shift(f, head, n_rows, i, n)
    strength = relaxation(tau, head)
    target = tl.load(log_rho + head)
    f_half = row_potential(f, head, n_rows, half, i, n)
    pulled = tl.zeros([ROWS], tl.float32)
    for start in range(0, m, COLS):
        j = start + tl.arange(0, COLS)
        col = valid_lines(mask.cols, head, j, m)
        k = tokens(key, mask.lead, head, j, col, d, D)
        scores = score_tile(mask, head, i, j, row, col, q, k, shift, scale, L2)
        away = vector(excess, head, n_cols, half, j, m) + target
        share = tl.exp(scores + f_half[:, None] - away[None, :])
        pulled += tl.sum(share * vector(dg, head, n_cols, half, j, m)[None, :], 1)
    adjoint = -strength * pulled
    if ADD:
        adjoint += vector(df, head, n_rows, half, i, n)
        tl.debug_barrier()  # several threads may have read an entry that one of them replaces
    tl.store(df + (head.to(tl.int64) * n_rows + half) * n + i, tl.where(row, adjoint, 0.0), mask=i < n)


@triton.jit(do_not_specialize=["half"])
def col_adjoint(
    query, key, mask, n, m, f, excess, tau, df, dg, half, n_rows, n_cols, scale, d,
    L2: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Walk back over row step `half`: `dg = −Σ_i exp(C + f + g) df`, for the column step before it."""
    head, j = block(m, COLS)
    col = valid_lines(mask.cols, head, j, m)
    k = tokens(key, mask.lead, head, j, col, d, D)
    g = -relaxation(tau, head) * vector(excess, head, n_cols, half - 1, j, m)
    pulled = tl.zeros([COLS], tl.float32)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        row = valid_lines(mask.rows, head, i, n)
        q = tokens(query, mask.lead, head, i, row, d, D)
        scores = score_tile(mask, head, i, j, row, col, q, k, row_shift(f, head, n_rows, i, n), scale, L2)
        share = tl.exp(scores + row_potential(f, head, n_rows, half, i, n)[:, None] + g[None, :])
        pulled += tl.sum(share * vector(df, head, n_rows, half, i, n)[:, None], 0)
    at = dg + (head.to(tl.int64) * n_cols + half - 1) * m + j
    tl.store(at, tl.where(col, -pulled, 0.0), mask=j < m)


@triton.jit
def score_gradient(
    scores, incoming, v, n, m, f, excess, tau, log_rho, dropout, df, dg, change, head, i, j, n_rows, n_cols
):  # fmt: skip
    """A tile of the gradient of the scores."""
    strength = relaxation(tau, head)
    target = tl.load(log_rho + head)
    f_last = row_potential(f, head, n_rows, n_rows - 1, i, n)
    g_last = -strength * vector(excess, head, n_cols, n_cols - 1, j, m)
    weights = tl.exp(scores + f_last[:, None] + g_last[None, :])
    inside = tl.dot(incoming, tl.trans(v), input_precision="ieee")
    if dropout.seed is not None:
        inside = tl.where(is_kept(dropout, head, i, j), inside * dropout.scale, 0.0)
    beside = tl.zeros(scores.shape, tl.float32)
    steps = change + head.to(tl.int64) * (n_rows + n_cols)
    for half in range(n_rows):
        f_half = row_potential(f, head, n_rows, half, i, n)
        g_half = -strength * vector(excess, head, n_cols, half - 1, j, m)
        pull = vector(df, head, n_rows, half, i, n)
        if tl.load(steps + half) <= NEAR:
            inside -= (tl.exp(f_half - f_last) * pull)[:, None] * tl.exp(g_half - g_last)[None, :]
        else:
            beside += tl.exp(scores + f_half[:, None] + g_half[None, :]) * pull[:, None]
    for half in range(n_cols):
        f_half = row_potential(f, head, n_rows, half, i, n)
        away = vector(excess, head, n_cols, half, j, m) + target
        pull = strength * vector(dg, head, n_cols, half, j, m)
        if tl.load(steps + n_rows + half) <= NEAR:
            inside -= tl.exp(f_half - f_last)[:, None] * (tl.exp(-away - g_last) * pull)[None, :]
        else:
            beside += tl.exp(scores + f_half[:, None] - away[None, :]) * pull[None, :]
    return tl.where(scores == float("-inf"), 0.0, weights * inside - beside)


@triton.jit
def query_step(
    d_out, query, key, value, mask, n, m, f, excess, tau, log_rho, dropout, df, dg, change, d_query, d_bias,
    n_rows, n_cols, scale, d, e,
    L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`dQ = scale·dC K`, and `dC` itself where the bias asks for it."""
    head, i = block(n, ROWS)
    row = valid_lines(mask.rows, head, i, n)
    q = tokens(query, mask.lead, head, i, row, d, D)
    shift = row_shift(f, head, n_rows, i, n)
    incoming = tokens(d_out, mask.lead, head, i, row, e, E)
    summed = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, m, COLS):
        j = start + tl.arange(0, COLS)
        col = valid_lines(mask.cols, head, j, m)
        k = tokens(key, mask.lead, head, j, col, d, D)
        v = tokens(value, mask.lead, head, j, col, e, E)
        scores = score_tile(mask, head, i, j, row, col, q, k, shift, scale, L2)
        grad = score_gradient(
            scores, incoming, v, n, m, f, excess, tau, log_rho, dropout, df, dg, change, head, i, j, n_rows, n_cols
        )  # fmt: skip
        if d_bias is not None:
            at = d_bias + (head.to(tl.int64) * n + i)[:, None] * m + j[None, :]
            tl.store(at, grad, mask=(i < n)[:, None] & (j < m)[None, :])
        summed += tl.dot(grad.to(k.dtype), k, input_precision="ieee")
    store_tokens(d_query, head, i, n, row, d, summed * scale, D)


@triton.jit
def key_step(
    d_out, query, key, value, mask, n, m, f, excess, tau, log_rho, dropout, df, dg, change, d_key,
    n_rows, n_cols, scale, d, e,
    L2: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`dK = scale·dCᵀ Q`, less `scale·k` for every unit of its column where the cost is L2."""
    head, j = block(m, COLS)
    col = valid_lines(mask.cols, head, j, m)
    k = tokens(key, mask.lead, head, j, col, d, D)
    v = tokens(value, mask.lead, head, j, col, e, E)
    summed = tl.zeros([COLS, D], tl.float32)
    column = tl.zeros([COLS], tl.float32)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        row = valid_lines(mask.rows, head, i, n)
        q = tokens(query, mask.lead, head, i, row, d, D)
        incoming = tokens(d_out, mask.lead, head, i, row, e, E)
        scores = score_tile(mask, head, i, j, row, col, q, k, row_shift(f, head, n_rows, i, n), scale, L2)
        grad = score_gradient(
            scores, incoming, v, n, m, f, excess, tau, log_rho, dropout, df, dg, change, head, i, j, n_rows, n_cols
        )  # fmt: skip
        summed += tl.dot(tl.trans(grad).to(q.dtype), q, input_precision="ieee")
        if L2:
            column += tl.sum(grad, 0)
    if L2:
        summed -= column[:, None] * k.to(tl.float32)
    store_tokens(d_key, head, j, m, col, d, summed * scale, D)
