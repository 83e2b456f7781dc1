"""How far rounding may move causal weights and their gradients: as in `bounds`, with sums that run along the rows."""

import torch
from torch import Tensor

from fuzzing import bounds
from fuzzing.bounds import LARGEST, VANISHING, Backward, Forward, Rounding, step_term
from fuzzing.causal_oracle import CausalRun, Prefixes, Streamed, own_rows
from fuzzing.oracle import masked_exp


def forward(run: CausalRun, s_err: Tensor, rounding: Rounding) -> Forward:
    return _prefix_forward(run, s_err, rounding) if isinstance(run, Prefixes) else _forward(run, s_err, rounding)


def weight_error(run: CausalRun, known: Forward) -> Tensor:
    """Of the weights (…, n, m), absolute; exactly 0 where masked."""
    if isinstance(run, Prefixes):
        zeroed = VANISHING[torch.float32] * LARGEST[torch.float32] ** 0.5  # the kernel is shared by all prefixes
        return torch.where(run.valid, own_rows(bounds.weight_error(run.each, known)) + zeroed, 0.0)
    valid = run.scores != -torch.inf
    return torch.where(valid, run.weights * known.final.clamp_max(50).expm1() + known.zeroed[-1], 0.0)


def backward(run: CausalRun, known: Forward, d_weights: Tensor, magnitude: Tensor, rounding: Rounding) -> Backward:
    if isinstance(run, Prefixes):
        return _prefix_backward(run, known, d_weights, magnitude, rounding)
    return _backward(run, known, d_weights, magnitude, rounding)


def _forward(run: Streamed, s_err: Tensor, rounding: Rounding) -> Forward:
    eps, (n, m) = rounding.eps, run.scores.shape[-2:]
    valid = run.scores != -torch.inf
    top = torch.where(run.rows, run.scores.amax(-1) if m else run.f[0], 0.0)
    depth, s_err = torch.where(valid, (run.scores - top[..., None]).abs(), 0.0), torch.where(valid, s_err, 0.0)
    phi, gamma, f, g = torch.zeros_like(run.f[0]), torch.zeros_like(run.scores), run.f[0], run.g[0]
    averages, errors, excesses, zeroed = [], [], [], []
    for step in range(len(run.f) + len(run.g) - 2):
        half = step // 2
        if step % 2 == 0:
            f = run.f[half + 1]
            average = masked_exp(run.scores + f[..., None] + g)
            error = s_err + gamma + _additions(eps, depth, f + top, g)
            zeroed.append(_zeroed(rounding, f + top, g, valid))
            phi = (average * error + zeroed[-1]).sum(-1) + eps * (m**0.5 + 2)
            averages.append(average)
            errors.append(error + phi[..., None])
        else:
            g, sums = run.g[half + 1], run.sums[half]
            error = s_err + phi[..., None] + _additions(eps, depth, f + top, g)
            attention = run.scores + f[..., None]
            zeroed.append(_zeroed(rounding, f + top, -sums, valid, 1 / VANISHING[rounding.dtype]))
            rounded = eps * (n**0.5 + 4 + sums.abs())  # the target is rounded like the sum
            excess = _running_mean(attention, sums, error + zeroed[-1].clamp_max(1.0)) + rounded
            gamma = torch.where(valid, run.tau[..., None, None] * excess + eps * g.abs(), 0.0)
            averages.append(attention)
            errors.append(error)
            excesses.append(excess)
    final = s_err + phi[..., None] + gamma + _additions(eps, depth, f + top, g) + 4 * eps
    return Forward(final, averages, errors, excesses, [*zeroed, _zeroed(rounding, f + top, g, valid)])


def _zeroed(rounding: Rounding, f: Tensor, g: Tensor, valid: Tensor, largest: float | None = None) -> Tensor:
    scaling = (f[..., None] + g).exp().clamp(1, largest or LARGEST[rounding.dtype])
    return torch.where(valid, VANISHING[rounding.dtype] * scaling, 0.0)


def _additions(eps: float, depth: Tensor, f: Tensor, g: Tensor) -> Tensor:
    return eps * (depth + f.abs()[..., None] + g.abs())


def _running_mean(attention: Tensor, sums: Tensor, error: Tensor) -> Tensor:
    """The mean of errors over each row and those before it, by the attention that a key received from them."""
    found, mean = [], torch.zeros_like(error[..., 0, :]) if error.shape[-2] else error
    for i in range(error.shape[-2]):
        new = masked_exp(attention[..., i, :] - sums[..., i, :]).clamp_max(1.0)
        mean = (1 - new) * mean + new * error[..., i, :]
        found.append(mean)
    return torch.stack(found, -2) if found else error


def _sum_of_later(values: Tensor, sums: Tensor) -> Tensor:
    """Of row k: the sum over i ≥ k of values_i·e^(sums_k − sums_i)."""
    found, total = [], torch.zeros_like(values[..., 0, :]) if values.shape[-2] else values
    for k in reversed(range(values.shape[-2])):
        if found:
            total = (sums[..., k, :] - sums[..., k + 1, :]).exp().clamp_max(1.0) * total
        total = total + values[..., k, :]
        found.append(total)
    return torch.stack(found[::-1], -2) if found else values


def _backward(run: Streamed, known: Forward, d_weights: Tensor, magnitude: Tensor, rounding: Rounding) -> Backward:
    """`magnitude` is the sum of the absolute terms that `d_weights` is a sum of."""
    eps, weights, by = rounding.eps, run.weights, run.tau[..., None, None]
    start = magnitude * weight_error(run, known)
    grad, grad_error = weights * d_weights, start.clone()
    df, dg, df_error, dg_error = grad.sum(-1), grad, start.sum(-1), start
    tau_error = torch.zeros_like(run.tau)
    for step in reversed(range(len(known.averages))):
        average, error, lost = known.averages[step], known.errors[step] + 4 * eps, known.zeroed[step]
        if step % 2 == 0:
            term, term_error = step_term(average, error, lost, -df[..., None], df_error[..., None])
            dg, dg_error = dg + term, dg_error + term_error
            df, df_error = torch.zeros_like(df), torch.zeros_like(df)
        else:
            excess, sums = run.excess[step // 2], run.sums[step // 2]
            off = known.excess[step // 2] + eps * excess.abs() + 4 * eps
            tau_error = tau_error + (dg_error * (excess.abs() + off) + dg.abs() * off).sum((-2, -1))
            share = masked_exp(average - sums).clamp_max(1.0)
            term = -share * _sum_of_later(by * dg, sums)
            later = _sum_of_later(by * dg.abs(), sums)
            later_error = _sum_of_later(by * (dg_error * (1 + off) + off * dg.abs()), sums)
            rounded = eps * (run.scores.shape[-2] ** 0.5 + 2)
            term_error = share * (later_error * (1 + error) + (error + rounded) * later) + lost.clamp_max(1.0) * later
            df, df_error = df + term.sum(-1), df_error + term_error.sum(-1)
            dg, dg_error = torch.zeros_like(dg), torch.zeros_like(dg)
        grad, grad_error = grad + term, grad_error + term_error
    return Backward(grad, grad_error, tau_error)


def _prefix_forward(run: Prefixes, s_err: Tensor, rounding: Rounding) -> Forward:
    """By prefix. The kernel is exponentiated once for all of them, less the maxima of whole rows."""
    if not run.scores.numel():
        return bounds.forward(run.each, run.each.scores, rounding)
    every = run.rows | run.cols
    top = torch.where(every[..., None, :] & every[..., None], run.scores, -torch.inf)
    depth = (top.amax(-1, keepdim=True) - run.scores).clamp(
        0, -2 * torch.tensor(VANISHING[rounding.dtype]).log().item()
    )
    s_err = s_err + rounding.eps * depth.nan_to_num(0.0)
    return bounds.forward(run.each, s_err[..., None, :, :].expand(run.each.scores.shape), rounding)


def _prefix_backward(
    run: Prefixes, known: Forward, d_weights: Tensor, magnitude: Tensor, rounding: Rounding
) -> Backward:
    own = torch.eye(run.scores.shape[-1], dtype=torch.float64)[..., None]  # row i of prefix i
    d_each, magnitude = d_weights[..., None, :, :] * own, magnitude[..., None, :, :] * own
    back = bounds.backward(run.each, known, d_each, magnitude, rounding)
    adding = rounding.eps * (run.scores.shape[-1] ** 0.5 + 2) * back.scores.abs().sum(-3)
    return Backward(back.scores.sum(-3), back.scores_error.sum(-3) + adding, back.tau_error.sum(-1))
