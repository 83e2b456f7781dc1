"""A whole head in one program, for short sequences: its scores are exponentiated once and stay on the chip.

A step is then a product of that matrix with a vector, so that forward has the two products of tokens that SoftMax
attention has, and backward its five, whatever n_iters is; one exponential an entry is taken in each direction.

The matrix is that of the scores less their rows' maxima. An entry below e⁻⁸⁷ underflows, and what is lost is at most
1e-38 of the scalings that would have multiplied it: while those stay below e⁴⁰ together, 3e-21 of a weight. Where they
do not, the head is computed again in the log domain, by the same program.
"""

import triton
import triton.language as tl

from sinkformers.kernels.triton.backward import NEAR
from sinkformers.kernels.triton.dropout import is_kept
from sinkformers.kernels.triton.forward import relaxation, row_potential, row_shift, vector
from sinkformers.kernels.triton.operands import masked_scores, squared_lengths, store_tokens, tokens, valid_lines

FEATURES = 16  # at a time: more of them take registers that the scores need


@triton.jit
def product(
    left, right, lead, head, i, j, row, col, width, ROWS: tl.constexpr, COLS: tl.constexpr, FEATURES: tl.constexpr
):
    """All products of the tokens of two operands, a few features at a time: what a thread holds does not grow."""
    summed = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, width, FEATURES):
        x = tokens(left, lead, head, i, row, width, FEATURES, first)
        y = tokens(right, lead, head, j, col, width, FEATURES, first)
        summed += tl.dot(x, tl.trans(y), input_precision="ieee")
    return summed


@triton.jit
def head_scores(
    query, key, mask, head, i, j, row, col, shift, scale, d,
    L2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """All scores of a head, each row less its shift."""
    squares = tl.zeros([COLS], tl.float32)
    if L2:
        for first in range(0, d, FEATURES):
            squares += squared_lengths(tokens(key, mask.lead, head, j, col, d, FEATURES, first))
    summed = product(query, key, mask.lead, head, i, j, row, col, d, ROWS, COLS, FEATURES)
    return masked_scores(mask, head, i, j, row, col, summed, squares, shift, scale, L2)


@triton.jit
def positive_maximum(x):
    return tl.maximum(tl.max(x, 0), 0.0)


@triton.jit
def logarithm(x, valid):
    """The logarithm of sums that underflow to zero at worst; 0 where not valid."""
    return tl.log(tl.where(valid, tl.maximum(x, 1e-37), 1.0))


@triton.jit
def logsumexp(x, valid, AXIS: tl.constexpr):
    """Log-sum-exp along an axis of the valid rows or columns; 0 for the others."""
    top = tl.max(x, AXIS)
    top = tl.where(top == float("-inf"), 0.0, top)
    return tl.where(valid, top, 0.0) + logarithm(tl.sum(tl.exp(x - tl.expand_dims(top, AXIS)), AXIS), valid)


@triton.jit
def steps_by_scaling(
    kernel, row, col, at_rows, at_cols, n, m, inside_rows, inside_cols, strength, target, n_rows, n_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """All steps as scalings of the exponentiated scores: the last potentials, and the largest that two came to."""
    f = tl.zeros([ROWS], tl.float32)
    g = tl.zeros([COLS], tl.float32)
    worst = positive_maximum(g)
    half = 0
    while (half < n_rows) & (worst <= NEAR):
        f = -logarithm(tl.sum(kernel * tl.exp(g)[None, :], 1), row)
        tl.store(at_rows + half * n, f, mask=inside_rows)
        highest = positive_maximum(f)
        worst = tl.maximum(worst, highest + positive_maximum(g))
        if (half < n_cols) & (worst <= NEAR):
            away = tl.where(col, logarithm(tl.sum(kernel * tl.exp(f)[:, None], 0), col) - target, 0.0)
            tl.store(at_cols + half * m, away, mask=inside_cols)
            g = -strength * away
            worst = tl.maximum(worst, highest + positive_maximum(-away - target))
        half += 1
    return f, g, worst


@triton.jit
def steps_in_logarithms(
    scores, row, col, at_rows, at_cols, n, m, inside_rows, inside_cols, strength, target, n_rows, n_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """All steps as log-sum-exp of the scores: the last potentials."""
    f = tl.zeros([ROWS], tl.float32)
    g = tl.zeros([COLS], tl.float32)
    for half in range(n_rows):
        f = -logsumexp(scores + g[None, :], row, 1)
        tl.store(at_rows + half * n, f, mask=inside_rows)
        if half < n_cols:
            away = tl.where(col, logsumexp(scores + f[:, None], col, 0) - target, 0.0)
            tl.store(at_cols + half * m, away, mask=inside_cols)
            g = -strength * away
    return f, g


@triton.jit
def head_forward(
    query, key, value, mask, n, m, f, excess, tau, log_rho, dropout, out, n_rows, n_cols, scale, d, e,
    ROWS_LAST: tl.constexpr, L2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """The output of one head, and the tables `f` and `excess` that the passes over tiles write as well."""
    head = tl.program_id(0)
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    row, col = valid_lines(mask.rows, head, i, n), valid_lines(mask.cols, head, j, m)
    strength, target = relaxation(tau, head), tl.load(log_rho + head)
    at_rows, at_cols = f + head.to(tl.int64) * (n_rows + 1) * n + i, excess + head.to(tl.int64) * n_cols * m + j
    at_steps = at_rows + n  # behind the maxima

    shift = tl.zeros([ROWS], tl.float32)
    scores = head_scores(query, key, mask, head, i, j, row, col, shift, scale, d, L2, ROWS, COLS, FEATURES)
    top = tl.where(row, tl.max(scores, 1), 0.0)
    tl.store(at_rows, top, mask=i < n)
    weights = tl.exp(scores - top[:, None])
    level = tl.zeros([ROWS], tl.float32)
    f_last, g, worst = steps_by_scaling(
        weights, row, col, at_steps, at_cols, n, m, i < n, j < m, strength, target, n_rows, n_cols, ROWS, COLS
    )
    if worst <= NEAR:
        weights = weights * tl.exp(g)[None, :]
    else:
        scores = head_scores(query, key, mask, head, i, j, row, col, top, scale, d, L2, ROWS, COLS, FEATURES)
        f_last, g = steps_in_logarithms(
            scores, row, col, at_steps, at_cols, n, m, i < n, j < m, strength, target, n_rows, n_cols, ROWS, COLS
        )
        weights = scores + g[None, :]
        level = tl.where(row, tl.max(weights, 1), 0.0)
        weights = tl.exp(weights - level[:, None])
    # Relative to its row's sum no weight exceeds 1, in half precision either, whatever the column sums are.
    total = tl.where(row, tl.sum(weights, 1), 1.0)
    weights = weights / total[:, None]
    if dropout.seed is not None:
        weights = tl.where(is_kept(dropout, head, i, j), weights, 0.0)
    factor = tl.where(row, 1.0, 0.0)
    if not ROWS_LAST:
        factor *= total * tl.exp(level + f_last)
    if dropout.seed is not None:
        factor *= dropout.scale
    for first in range(0, e, FEATURES):
        v = tokens(value, mask.lead, head, j, col, e, FEATURES, first)
        summed = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        store_tokens(out, head, i, n, row, e, summed * factor[:, None], FEATURES, first)


@triton.jit
def largest_change(f, excess, f_last, g_last, head, i, j, n, m, strength, target, n_rows, n_cols):
    """By how much the logarithm of a step's kernel may exceed that of the last weights."""
    change = positive_maximum(vector(f, head, n_rows + 1, 1, i, n) - f_last) + positive_maximum(-g_last)
    for half in range(n_cols):
        across = positive_maximum(row_potential(f, head, n_rows, half, i, n) - f_last)
        away = vector(excess, head, n_cols, half, j, m)
        change = tl.maximum(change, across + positive_maximum(-away - target - g_last))
        before = -strength * vector(excess, head, n_cols, half - 1, j, m)
        change = tl.maximum(change, across + positive_maximum(before - g_last))
    return change


@triton.jit
def gradient_by_scaling(
    weights, inside, f, excess, f_last, g_last, head, i, j, n, m, strength, target, n_rows, n_cols,
    ROWS_LAST: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores from that of the weights, and the gradient of tau: each step's kernel is the last
    weights times a scaling of rows and one of columns."""
    df, dg = tl.sum(weights * inside, 1), tl.sum(weights * inside, 0)
    d_tau = tl.sum(dg, 0) * 0.0
    if ROWS_LAST:
        inside -= df[:, None]
        dg -= tl.sum(weights * df[:, None], 0)
        df = tl.zeros_like(df)
    for back in range(n_cols):
        half = n_cols - 1 - back
        across = tl.exp(row_potential(f, head, n_rows, half, i, n) - f_last)
        away = vector(excess, head, n_cols, half, j, m)
        pull = tl.exp(-away - target - g_last) * strength * dg
        d_tau -= tl.sum(dg * away, 0)
        inside -= across[:, None] * pull[None, :]
        pull_rows = across * (df - across * tl.sum(weights * pull[None, :], 1))
        down = tl.exp(-strength * vector(excess, head, n_cols, half - 1, j, m) - g_last)
        inside -= pull_rows[:, None] * down[None, :]
        dg = -down * tl.sum(weights * pull_rows[:, None], 0)
        df = tl.zeros_like(df)
    return weights * inside, d_tau


@triton.jit
def gradient_in_logarithms(
    scores, grad, f, excess, head, i, j, n, m, strength, target, n_rows, n_cols, ROWS_LAST: tl.constexpr
):
    """The same from `P∘dP`, where each step's kernel is exponentiated."""
    df, dg = tl.sum(grad, 1), tl.sum(grad, 0)
    d_tau = tl.sum(dg, 0) * 0.0
    if ROWS_LAST:
        g = -strength * vector(excess, head, n_cols, n_cols - 1, j, m)
        f_last = row_potential(f, head, n_rows, n_rows - 1, i, n)
        change = tl.exp(scores + f_last[:, None] + g[None, :]) * df[:, None]
        grad -= change
        dg -= tl.sum(change, 0)
        df = tl.zeros_like(df)
    for back in range(n_cols):
        half = n_cols - 1 - back
        f_half = row_potential(f, head, n_rows, half, i, n)
        away = vector(excess, head, n_cols, half, j, m)
        d_tau -= tl.sum(dg * away, 0)
        change = tl.exp(scores + f_half[:, None] - (away + target)[None, :]) * (strength * dg)[None, :]
        grad -= change
        df -= tl.sum(change, 1)
        g = -strength * vector(excess, head, n_cols, half - 1, j, m)
        change = tl.exp(scores + f_half[:, None] + g[None, :]) * df[:, None]
        grad -= change
        dg = -tl.sum(change, 0)
        df = tl.zeros_like(df)
    return grad, d_tau


@triton.jit
def head_backward(
    d_out, query, key, value, mask, n, m, f, excess, tau, log_rho, dropout, d_query, d_key, d_value, d_bias, d_tau,
    n_rows, n_cols, scale, d, e,
    NEAR_ONES: tl.constexpr, FAR_ONES: tl.constexpr, ROWS_LAST: tl.constexpr, L2: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """All gradients of one head, from the tables that forward wrote.

    A launch serves the heads whose steps are near the last one, or the others, or with more registers both.
    """
    head = tl.program_id(0)
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    row, col = valid_lines(mask.rows, head, i, n), valid_lines(mask.cols, head, j, m)
    strength, target = relaxation(tau, head), tl.load(log_rho + head)
    shift, f_last = row_shift(f, head, n_rows, i, n), row_potential(f, head, n_rows, n_rows - 1, i, n)
    g_last = -strength * vector(excess, head, n_cols, n_cols - 1, j, m)

    near = largest_change(f, excess, f_last, g_last, head, i, j, n, m, strength, target, n_rows, n_cols) <= NEAR
    if near:
        if not NEAR_ONES:
            return
    elif not FAR_ONES:
        return

    scores = head_scores(query, key, mask, head, i, j, row, col, shift, scale, d, L2, ROWS, COLS, FEATURES)
    weights = tl.exp(scores + f_last[:, None] + g_last[None, :])
    dropped, factor = weights, 1.0
    if dropout.seed is not None:
        dropped, factor = tl.where(is_kept(dropout, head, i, j), weights, 0.0), dropout.scale
    for first in range(0, e, FEATURES):
        incoming = tokens(d_out, mask.lead, head, i, row, e, FEATURES, first)
        summed = tl.dot(tl.trans(dropped.to(incoming.dtype)), incoming, input_precision="ieee")
        store_tokens(d_value, head, j, m, col, e, summed * factor, FEATURES, first)
    inside = product(d_out, value, mask.lead, head, i, j, row, col, e, ROWS, COLS, FEATURES)
    if dropout.seed is not None:
        inside = tl.where(is_kept(dropout, head, i, j), inside * factor, 0.0)
    inside = tl.where(weights == 0.0, 0.0, inside)  # which no value that is NaN must reach where masked

    if NEAR_ONES and (near or not FAR_ONES):
        grad, of_tau = gradient_by_scaling(
            weights, inside, f, excess, f_last, g_last, head, i, j, n, m, strength, target, n_rows, n_cols, ROWS_LAST
        )
    else:
        scores = head_scores(query, key, mask, head, i, j, row, col, shift, scale, d, L2, ROWS, COLS, FEATURES)
        grad, of_tau = gradient_in_logarithms(
            scores, weights * inside, f, excess, head, i, j, n, m, strength, target, n_rows, n_cols, ROWS_LAST
        )
    if d_tau is not None:
        tl.store(d_tau + head, of_tau)
    if d_bias is not None:
        at = d_bias + (head.to(tl.int64) * n + i)[:, None] * m + j[None, :]
        tl.store(at, grad, mask=(i < n)[:, None] & (j < m)[None, :])
    down = tl.zeros([COLS], tl.float32)
    if L2:
        down = tl.sum(grad, 0)
    for first in range(0, d, FEATURES):
        q = tokens(query, mask.lead, head, i, row, d, FEATURES, first)
        k = tokens(key, mask.lead, head, j, col, d, FEATURES, first)
        summed = tl.dot(grad.to(k.dtype), k, input_precision="ieee")
        store_tokens(d_query, head, i, n, row, d, summed * scale, FEATURES, first)
        summed = tl.dot(tl.trans(grad.to(q.dtype)), q, input_precision="ieee")
        if L2:
            summed -= down[:, None] * k.to(tl.float32)
        store_tokens(d_key, head, j, m, col, d, summed * scale, FEATURES, first)
