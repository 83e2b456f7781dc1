"""Sinkhorn attention in float64, written from its definition. Nothing here is imported from the library.

With scores C, row masses a and column masses b (uniform over the valid rows and columns where none are given), from
g = 0:

    rows     f = −LSE_j(C + g + log b)
    columns  g = −τ·LSE_i(C + f + log a)
    weights  exp(C + f + g + log b)

A masked entry has the score minus infinity. A row or a column without a valid entry is left out of every sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """The iterations on scores (…, n, m), which contain log b: potentials at the start and after each step."""

    scores: Tensor  # minus infinity where masked
    rows: Tensor  # (…, n) bool: valid
    cols: Tensor  # (…, m)
    log_a: Tensor  # (…, n)
    log_b: Tensor  # (…, m)
    f: list[Tensor]
    g: list[Tensor]
    excess: list[Tensor]  # (…, m): LSE_i(C + f + log a) of each column step
    tau: Tensor  # (…)

    @property
    def weights(self) -> Tensor:
        return masked_exp(self.scores + self.f[-1][..., None] + self.g[-1][..., None, :])


def masked_exp(x: Tensor) -> Tensor:
    """The exponential, with a gradient that is zero, and never NaN, where x is minus infinity."""
    out = x.detach() == -torch.inf
    return torch.where(out, 0.0, torch.where(out, 0.0, x).exp())


def masked_lse(x: Tensor, dim: int, valid: Tensor) -> Tensor:
    """Log-sum-exp along an axis; 0 where nothing is valid."""
    if not x.shape[dim]:
        return torch.zeros(valid.shape, dtype=x.dtype)
    filled = torch.where(valid.unsqueeze(dim), x, 0.0)
    top = filled.detach().amax(dim, keepdim=True)
    lse = masked_exp(filled - top).sum(dim).log() + top.squeeze(dim)
    return torch.where(valid, lse, 0.0)


def iterate(
    scores: Tensor,
    valid: Tensor,
    n_iters: int,
    tau: Tensor,
    row_mass: Tensor | None = None,
    col_mass: Tensor | None = None,
) -> Run:
    """`n_iters` normalisations of scores (…, n, m), of which the entries that are not `valid` are never read."""
    valid = valid & ~(scores.detach() == -torch.inf)
    if row_mass is not None:
        valid = valid & (row_mass > 0)[..., None]
    if col_mass is not None:
        valid = valid & (col_mass > 0)[..., None, :]
    rows, cols = valid.any(-1), valid.any(-2)
    log_a, log_b = _log_mass(row_mass, rows, scores), _log_mass(col_mass, cols, scores)
    scores = torch.where(valid, scores, -torch.inf)
    scores = scores + torch.where(cols, log_b, 0.0)[..., None, :]
    f, g, excess = [torch.zeros_like(log_a)], [torch.zeros_like(log_b)], []
    for step in range(n_iters):
        if step % 2 == 0:
            f.append(-masked_lse(scores + g[-1][..., None, :], -1, rows))
        else:
            x = scores + (f[-1] + log_a)[..., None]
            excess.append(torch.where(cols, masked_lse(x, -2, cols) - log_b, 0.0))
            g.append(-tau[..., None] * excess[-1])
    return Run(scores, rows, cols, log_a, log_b, f, g, excess, tau)


def converge(scores: Tensor, valid: Tensor, tau: Tensor, **masses: Tensor) -> Run:
    """As many normalisations as it takes until two more change no weight by 1e-14; at most 20,001."""
    for n_iters in (41, 201, 1001, 5001, 20001):
        run = iterate(scores, valid, n_iters, tau, **masses)
        before = masked_exp(run.scores + run.f[-2][..., None] + run.g[-2][..., None, :])
        if (run.weights - before).abs().max() < 1e-14:
            break
    return run


def _log_mass(mass: Tensor | None, valid: Tensor, scores: Tensor) -> Tensor:
    mass = torch.ones_like(valid, dtype=scores.dtype) if mass is None else mass.to(scores.dtype)
    mass = torch.where(valid, mass, 0.0)
    total = mass.sum(-1, keepdim=True)
    mass = mass / torch.where(total == 0, 1.0, total)
    return torch.where(mass > 0, mass, 1.0).log()


def attention_scores(query: Tensor, key: Tensor, scale: float, cost: str) -> Tensor:
    if cost == "dot":
        return scale * (query @ key.mT)
    return -0.5 * scale * (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)


def attend(run: Run, value: Tensor, dropout: Tensor | None) -> Tensor:
    weights = run.weights
    return (weights if dropout is None else weights * dropout) @ value


def fixed_point_system(weights: Tensor, tau: Tensor, row_mass: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The plan `diag(a)·W`, and the symmetric system with the blocks diag(plan 1), plan, planᵀ, diag(planᵀ1)/τ."""
    plan = weights if row_mass is None else weights * row_mass[..., None]
    top = torch.cat([torch.diag_embed(plan.sum(-1)), plan], -1)
    bottom = torch.cat([plan.mT, torch.diag_embed(plan.sum(-2) / tau[..., None])], -1)
    return plan, torch.cat([top, bottom], -2)


def implicit_gradient(weights: Tensor, d_weights: Tensor, plan: Tensor, system: Tensor) -> Tensor:
    """The gradient of the scores at a fixed point: `W∘dW − plan∘(x 1ᵀ + 1 yᵀ)`.

    (x, y) solves the system for the row and column sums of W∘dW.
    """
    n = weights.shape[-2]
    local = weights * d_weights
    side = torch.cat([local.sum(-1), local.sum(-2)], -1)
    solution = (torch.linalg.pinv(system, hermitian=True, rtol=1e-12) @ side[..., None])[..., 0]
    return local - plan * (solution[..., :n, None] + solution[..., None, n:])


def condition(system: Tensor) -> Tensor:
    """The ratio of the largest eigenvalue to the smallest that is not zero, (…)."""
    values = torch.linalg.eigvalsh(system)
    top = values.amax(-1, keepdim=True)
    return (top[..., 0] / values.masked_fill(values <= 1e-10 * top, torch.inf).amin(-1)).nan_to_num(1.0, posinf=1.0)
