"""Sinkhorn's weights and their exact gradient for very many matrices of at most 64×64, all in registers.

The 4×4 matrices of hyper-connections come by the hundred thousand: there, one launch and one read of the scores is the
whole cost. A program holds a group of matrices from the first step to the last. The backward pass runs the steps again
and keeps a column vector per column step, no matrix: a row potential follows from the columns before it in one step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def tiny_forward(scores: Tensor, tau: Tensor | None, n_iters: int) -> Tensor:
    """Weights (B, n, m) of scores (B, n, m), n and m at most 64, minus infinity where masked; `tau` (B) or None.

    The steps run in float32 whatever the dtype of the scores, which the weights share.
    """
    scores = scores.resolve_neg()  # a negative view stores the opposite of its values
    weights = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    grid, sizes = _group(scores, 0)
    _forward[grid](scores, *scores.stride(), _flat(tau), weights, *scores.shape, n_iters, **sizes)
    return weights


def tiny_backward(d_weights: Tensor, scores: Tensor, tau: Tensor | None, n_iters: int) -> tuple[Tensor, Tensor | None]:
    """The gradients of the scores (B, n, m) and of tau (B), from that of the weights."""
    d_weights, scores = d_weights.resolve_neg(), scores.resolve_neg()
    d_scores = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    d_tau = None if tau is None else torch.empty(tau.shape, dtype=torch.float32, device=tau.device)
    steps = triton.next_power_of_2(max(1, n_iters // 2))
    grid, sizes = _group(scores, steps)
    _backward[grid](
        d_weights, *d_weights.stride(), scores, *scores.stride(), _flat(tau), d_scores, d_tau, *scores.shape, n_iters,
        STEPS=steps, **sizes,
    )  # fmt: skip
    return d_scores, d_tau if tau is None or d_tau is None else d_tau.to(tau.dtype)


def _flat(tau: Tensor | None) -> Tensor | None:
    return None if tau is None else tau.float().resolve_neg().contiguous()


def _group(scores: Tensor, steps: int) -> tuple[tuple[int], dict[str, int | bool]]:
    """How many matrices a program takes: what 128 threads hold in some 16 registers each, and one at least."""
    count, n, m = scores.shape
    rows, cols = triton.next_power_of_2(n), triton.next_power_of_2(m)
    group = max(1, 2048 // (cols * max(rows, steps)))
    sizes = {"GROUP": group, "ROWS": rows, "COLS": cols, "num_warps": 4, "enable_fp_fusion": True}
    return (triton.cdiv(count, group),), sizes


@triton.jit
def _load(data, stride, stride_row, stride_col, which, i, j, inside, MASKED: tl.constexpr):
    """A group of matrices (GROUP, ROWS, COLS) in float32."""
    at = (
        data
        + which.to(tl.int64)[:, None, None] * stride
        + i[None, :, None] * stride_row
        + j[None, None, :] * stride_col
    )
    return tl.load(at, mask=inside, other=float("-inf") if MASKED else 0.0).to(tl.float32)


@triton.jit
def _places(count, n, m, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    which = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    return which, i, j, (which < count)[:, None, None] & (i < n)[None, :, None] & (j < m)[None, None, :]


@triton.jit
def _participants(scores):
    """The scores less their rows' maxima, the lines that have an entry left, and log(rows/columns) of those."""
    masked = scores == float("-inf")
    # NaN at a valid entry keeps its row and column valid, and has to come out again.
    rows, cols = tl.max((masked == 0).to(tl.int32), 2) != 0, tl.max((masked == 0).to(tl.int32), 1) != 0
    top = tl.max(scores, 2)
    top = tl.where(top == float("-inf"), 0.0, top)
    # Finite scores stay finite: a difference beyond the range of float32 would read as a mask.
    shifted = tl.maximum(scores - top[:, :, None], -8.5e37, propagate_nan=tl.PropagateNan.ALL)
    n_rows, n_cols = tl.sum(rows.to(tl.float32), 1), tl.sum(cols.to(tl.float32), 1)
    log_rho = tl.log(tl.maximum(n_rows, 1.0) / tl.maximum(n_cols, 1.0))
    return tl.where(masked, float("-inf"), shifted), rows, cols, log_rho


@triton.jit
def _logsumexp(x, valid, AXIS: tl.constexpr):
    """Log-sum-exp along an axis of the valid rows or columns; 0 for the others."""
    top = tl.max(x, AXIS)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - tl.expand_dims(top, AXIS)), AXIS)
    return tl.where(valid, top + tl.log(tl.where(valid, total, 1.0)), 0.0)


@triton.jit
def _relaxation(tau, which, count):
    strength = tl.full(which.shape, 1.0, tl.float32)
    if tau is not None:
        strength = tl.load(tau + which, mask=which < count, other=1.0)
    return strength[:, None]


@triton.jit
def _excess(shifted, g, rows, cols, log_rho):
    """A row step and the column step after it: by how much the columns' sums miss their target, in logarithms."""
    f = -_logsumexp(shifted + g[:, None, :], rows, 2)
    return tl.where(cols, _logsumexp(shifted + f[:, :, None], cols, 1) - log_rho[:, None], 0.0)


@triton.jit(do_not_specialize=["n_iters"])
def _forward(
    scores, stride, stride_row, stride_col, tau, weights, count, n, m, n_iters,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    which, i, j, inside = _places(count, n, m, GROUP, ROWS, COLS)
    shifted, rows, cols, log_rho = _participants(
        _load(scores, stride, stride_row, stride_col, which, i, j, inside, True)
    )
    strength = _relaxation(tau, which, count)
    f = tl.zeros([GROUP, ROWS], tl.float32)
    g = tl.zeros([GROUP, COLS], tl.float32)
    for step in range(n_iters):
        if step % 2 == 0:
            f = -_logsumexp(shifted + g[:, None, :], rows, 2)
        else:
            away = _logsumexp(shifted + f[:, :, None], cols, 1) - log_rho[:, None]
            g = tl.where(cols, -strength * away, 0.0)
    result = tl.exp(shifted + f[:, :, None] + g[:, None, :])
    at = weights + (which[:, None, None] * n + i[None, :, None]) * m + j[None, None, :]
    tl.store(at, result.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _pick(bank, steps, half):
    """Vector number `half` of a bank (GROUP, STEPS, COLS). Registers have no index: all others are masked out."""
    return tl.sum(tl.where((steps == half)[None, :, None], bank, 0.0), 1)


@triton.jit
def _row_potential(shifted, bank, steps, half, strength, rows):
    return -_logsumexp(shifted - (strength * _pick(bank, steps, half - 1))[:, None, :], rows, 2)


@triton.jit(do_not_specialize=["n_iters"])
def _backward(
    d_weights, d_stride, d_stride_row, d_stride_col, scores, stride, stride_row, stride_col, tau, d_scores, d_tau,
    count, n, m, n_iters,
    STEPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    which, i, j, inside = _places(count, n, m, GROUP, ROWS, COLS)
    shifted, rows, cols, log_rho = _participants(
        _load(scores, stride, stride_row, stride_col, which, i, j, inside, True)
    )
    masked = shifted == float("-inf")
    strength = _relaxation(tau, which, count)
    steps = tl.arange(0, STEPS)
    n_cols = n_iters // 2

    bank = tl.zeros([GROUP, STEPS, COLS], tl.float32)
    g = tl.zeros([GROUP, COLS], tl.float32)
    for half in range(n_cols):
        away = _excess(shifted, g, rows, cols, log_rho)
        bank = tl.where((steps == half)[None, :, None], away[:, None, :], bank)
        g = -strength * away

    f = _row_potential(shifted, bank, steps, (n_iters - 1) // 2, strength, rows)
    incoming = _load(d_weights, d_stride, d_stride_row, d_stride_col, which, i, j, inside, False)
    # An incoming NaN where an entry is masked must not meet its zero.
    grad = tl.exp(shifted + f[:, :, None] + g[:, None, :]) * tl.where(masked, 0.0, incoming)
    df, dg = tl.sum(grad, 2), tl.sum(grad, 1)
    tau_adjoint = tl.zeros([GROUP], tl.float32)
    for back in range(n_iters):
        step = n_iters - 1 - back
        half = step // 2
        if step % 2 == 0:
            before = -strength * _pick(bank, steps, half - 1)
            change = tl.exp(shifted + f[:, :, None] + before[:, None, :]) * df[:, :, None]
            dg -= tl.sum(change, 1)
            df = tl.zeros_like(df)
        else:
            away = _pick(bank, steps, half)
            f = _row_potential(shifted, bank, steps, half, strength, rows)  # of the row step before it, too
            share = tl.exp(shifted + f[:, :, None] - (away + log_rho[:, None])[:, None, :])
            change = share * (strength * dg)[:, None, :]
            tau_adjoint -= tl.sum(dg * away, 1)
            df -= tl.sum(change, 2)
            dg = tl.zeros_like(dg)
        grad -= change
    at = d_scores + (which[:, None, None] * n + i[None, :, None]) * m + j[None, None, :]
    tl.store(at, tl.where(masked, 0.0, grad).to(d_scores.dtype.element_ty), mask=inside)
    if d_tau is not None:
        tl.store(d_tau + which, tau_adjoint, mask=which < count)
