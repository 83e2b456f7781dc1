"""Sinkhorn and its exact gradient in the log domain: one exponential per step, for scores of any size.

The kernel domain falls back to it for the few matrices whose scalings leave the floating-point range. The mathematics
is that of the reference; what is added is a gradient that keeps vectors instead of matrices.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core.definition import Definition
from sinkformers.core.problem import Problem


class Potentials(NamedTuple):
    """One vector per step. `excess` is the log of a column's sum over its target, before it is normalised."""

    scores: Tensor
    f: list[Tensor]
    excess: list[Tensor]


def potentials(problem: Problem, tau: Tensor | None, definition: Definition) -> Potentials:
    """Run the normalisations."""
    scores = problem.shifted()
    f, excess, g = [], [], torch.zeros_like(problem.target)
    for step in definition.steps():
        if step.rows:
            f.append(torch.where(problem.rows, -(scores + g[..., None, :]).logsumexp(-1), 0.0))
        else:
            total = (scores + (f[-1] + problem.log_weight())[..., None]).logsumexp(-2) - problem.log_target()
            excess.append(torch.where(problem.cols, total, 0.0))
            g = _relaxed(excess[-1], tau)
    return Potentials(scores, f, excess)


def weights(run: Potentials, problem: Problem, tau: Tensor | None) -> Tensor:
    """`exp(C + f + g)` (..., n, m) at the last potentials.

    The last step is repeated by division: added to scores of size s, its potential would be rounded to s·eps, and
    so would the sums that it is there to set.
    """
    if len(run.f) > len(run.excess):
        g = _relaxed(run.excess[-1], tau)[..., None, :] if run.excess else 0.0
        out = (run.scores + g).softmax(-1)
    else:
        excess = run.excess[-1]
        left = 0.0 if tau is None else (1 - tau[..., None]) * excess
        share = (run.scores + (run.f[-1] + problem.log_weight())[..., None]).softmax(-2)
        out = share * torch.exp(problem.log_target() + left)[..., None, :]
        if problem.weight is not None:
            out = out / problem.weight[..., None]
    return out.masked_fill_(run.scores == -torch.inf, 0.0)


def gradient(
    problem: Problem, tau: Tensor | None, definition: Definition, d_weights: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the scores (..., n, m) and of tau (...), from that of the weights."""
    run = potentials(problem, tau, definition)
    grad = weights(run, problem, tau) * d_weights
    df, dg = grad.sum(-1), grad.sum(-2)
    d_tau = torch.zeros_like(df[..., 0])
    for step in reversed(definition.steps()):
        if step.rows:
            col = torch.zeros_like(dg) if step.is_first() else _relaxed(run.excess[step.number - 1], tau)
            change = _softmax(run.scores, col[..., None, :], -1) * df[..., None]
            dg, df = dg - change.sum(-2), torch.zeros_like(df)
        else:
            excess = run.excess[step.number]
            share = _softmax(run.scores, (run.f[step.number] + problem.log_weight())[..., None], -2)
            change = share * (dg if tau is None else dg * tau[..., None])[..., None, :]
            if tau is not None:
                d_tau = d_tau - (dg * excess).sum(-1)
            df, dg = df - change.sum(-1), torch.zeros_like(dg)
        grad = grad - change
    # Last of all: NaN at a valid entry must not reach a masked one through its zero.
    grad = grad.masked_fill(run.scores == -torch.inf, 0.0)
    return grad, None if tau is None else d_tau


def _relaxed(excess: Tensor, tau: Tensor | None) -> Tensor:
    return -excess if tau is None else -tau[..., None] * excess


def _softmax(scores: Tensor, potential: Tensor, dim: int) -> Tensor:
    """The shares in the sums of one step, by division as in `weights`: the terms of the gradient cancel to rounding
    only if these sum to 1. Zero where masked even in a matrix that is NaN elsewhere."""
    return (scores + potential).softmax(dim).masked_fill_(scores == -torch.inf, 0.0)
