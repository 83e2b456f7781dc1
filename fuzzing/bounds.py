"""How far rounding may move the weights and every gradient: first order, entry by entry, from the exact iterates.

A score is known up to `s_err`. A row step averages the errors of its scores and of g over the row's weights, and adds
the rounding of a sum; a column step likewise, times τ. Since these averages have weights that sum to 1, errors add up
over the steps and never grow otherwise. The gradient walks back through the same averages: each step's term is a weight
times an adjoint, both with a known error.

The bound is multiplied by `SAFETY`, since the constants of exp, log, division and of products in blocks are not counted
one by one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing.oracle import Run, masked_exp

SAFETY = 2.0
# Exponentials below e^−87 are zero in float32, below e^−708 in float64; scalings up to 1e30 and 1e280 meet them.
VANISHING = {torch.float32: 1.7e-38, torch.float64: 3.4e-308}
LARGEST = {torch.float32: 1e30, torch.float64: 1e280}


class Rounding(NamedTuple):
    """The precision of the iterations."""

    eps: float
    dtype: torch.dtype

    @staticmethod
    def of(dtype: torch.dtype) -> "Rounding":
        """That of a dtype, or of float32 where it is narrower."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return Rounding(torch.finfo(dtype).eps, dtype)

    def zeroed(self, f: Tensor, g: Tensor, valid: Tensor, largest: float | None = None) -> Tensor:
        """What an entry (…, n, m) may lose, with row potentials that include the row maxima."""
        scaling = (f[..., None] + g[..., None, :]).exp().clamp(1, largest or LARGEST[self.dtype])
        return torch.where(valid, VANISHING[self.dtype] * scaling, 0.0)


class Forward(NamedTuple):
    """Relative errors (…, n, m) of the weights, and of the averages that each step takes."""

    final: Tensor
    averages: list[Tensor]
    errors: list[Tensor]
    excess: list[Tensor]  # (…, m) of the column steps
    zeroed: list[Tensor]  # (…, n, m): what each step's averages, and at last the weights, may lose


def forward(run: Run, s_err: Tensor, rounding: Rounding) -> Forward:
    eps, (n, m) = rounding.eps, run.scores.shape[-2:]
    valid = run.scores != -torch.inf
    top = torch.where(run.rows, run.scores.amax(-1) if m else run.f[0], 0.0)
    depth = torch.where(valid, (run.scores - top[..., None]).abs(), 0.0)
    s_err = torch.where(valid, s_err, 0.0)
    phi, gamma = torch.zeros_like(run.f[0]), torch.zeros_like(run.g[0])
    averages, errors, excesses, zeroed = [], [], [], []
    f, g = run.f[0], run.g[0]
    for step in range(len(run.f) + len(run.g) - 2):
        half = step // 2
        if step % 2 == 0:
            f = run.f[half + 1]
            average = masked_exp(run.scores + f[..., None] + g[..., None, :])
            error = s_err + gamma[..., None, :] + _additions(eps, depth, f + top, g)
            zeroed.append(rounding.zeroed(f + top, g, valid))
            phi = (average * error + zeroed[-1]).sum(-1) + eps * (m**0.5 + 2)
            averages.append(average)
            errors.append(error + phi[..., None])
        else:
            weighted, sums = f + run.log_a, run.excess[half] + run.log_b
            average = masked_exp(run.scores + weighted[..., None] - sums[..., None, :])
            g = run.g[half + 1]
            error = s_err + phi[..., None] + _additions(eps, depth, f + top, g)
            # A relaxed column may sum to next to nothing without large scalings: what it loses counts against its sum.
            zeroed.append(rounding.zeroed(weighted + top, -sums, valid, 1 / VANISHING[rounding.dtype]))
            excess = (average * error + zeroed[-1]).sum(-2) + eps * (n**0.5 + 2)
            gamma = run.tau[..., None] * excess + eps * g.abs()
            averages.append(average)
            errors.append(error + excess[..., None, :])
            excesses.append(excess)
    final = s_err + phi[..., None] + gamma[..., None, :] + _additions(eps, depth, f + top, g) + 4 * eps
    return Forward(final, averages, errors, excesses, [*zeroed, rounding.zeroed(f + top, g, valid)])


def _additions(eps: float, depth: Tensor, f: Tensor, g: Tensor) -> Tensor:
    return eps * (depth + f.abs()[..., None] + g.abs()[..., None, :])


def weight_error(run: Run, known: Forward) -> Tensor:
    """Of the weights (…, n, m), absolute; exactly 0 where masked."""
    valid = run.scores != -torch.inf
    return torch.where(valid, run.weights * known.final.clamp_max(50).expm1() + known.zeroed[-1], 0.0)


class Backward(NamedTuple):
    scores: Tensor  # the gradient itself, for the products that follow
    scores_error: Tensor
    tau_error: Tensor  # (…)


def backward(run: Run, known: Forward, d_weights: Tensor, magnitude: Tensor, rounding: Rounding) -> Backward:
    """`magnitude` is the sum of the absolute terms that `d_weights` is a sum of."""
    eps, weights = rounding.eps, run.weights
    start = magnitude * weight_error(run, known)
    grad, grad_error = weights * d_weights, start.clone()
    df, dg, df_error, dg_error = grad.sum(-1), grad.sum(-2), start.sum(-1), start.sum(-2)
    tau_error = torch.zeros_like(run.tau)
    for step in reversed(range(len(known.averages))):
        average, error, lost = known.averages[step], known.errors[step] + 4 * eps, known.zeroed[step]
        if step % 2 == 0:
            term, term_error = step_term(average, error, lost, df[..., None], df_error[..., None])
            dg, dg_error = dg - term.sum(-2), dg_error + term_error.sum(-2)
            df, df_error = torch.zeros_like(df), torch.zeros_like(df)
        else:
            excess = run.excess[step // 2]
            excess_error = known.excess[step // 2] + eps * excess.abs()
            tau_error = tau_error + (dg_error * (excess.abs() + excess_error) + dg.abs() * excess_error).sum(-1)
            by = run.tau[..., None, None]
            term, term_error = step_term(average, error, lost, by * dg[..., None, :], by * dg_error[..., None, :])
            df, df_error = df - term.sum(-1), df_error + term_error.sum(-1)
            dg, dg_error = torch.zeros_like(dg), torch.zeros_like(dg)
        grad, grad_error = grad - term, grad_error + term_error
    return Backward(grad, grad_error, tau_error)


def step_term(average: Tensor, error: Tensor, lost: Tensor, d: Tensor, d_error: Tensor) -> tuple[Tensor, Tensor]:
    """What a step adds to the gradient (…, n, m), from that of its potentials; and its error."""
    return average * d, average * (d_error * (1 + error) + error * d.abs()) + lost * d.abs()
