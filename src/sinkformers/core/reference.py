"""The specification. Every fast path is compared with it, gradients included; it is short rather than fast."""

import torch
from torch import Tensor

from sinkformers.core.definition import Definition
from sinkformers.core.problem import Problem


def reference_weights(problem: Problem, tau: Tensor | None, definition: Definition) -> Tensor:
    """Alternate row and column normalisation in the log domain; differentiable any number of times."""
    scores, rows, cols = problem.shifted(), problem.rows, problem.cols
    f, g = scores.new_zeros(rows.shape), scores.new_zeros(cols.shape)
    for step in definition.steps():
        if step.rows:
            f = -_logsumexp(scores + g[..., None, :], -1, rows)
        else:
            excess = _logsumexp(scores + (f + problem.log_weight())[..., None], -2, cols) - problem.log_target()
            g = -excess if tau is None else -tau[..., None] * excess
    if definition.ends_on_rows():  # the last row step by division: exact sums, whatever the size of the scores
        weights = (scores + g[..., None, :]).masked_fill(~rows[..., None], 0.0).softmax(-1)
    else:
        weights = torch.exp(scores + f[..., None] + g[..., None, :])
    return weights.masked_fill(scores == -torch.inf, 0.0)


def _logsumexp(x: Tensor, dim: int, valid: Tensor) -> Tensor:
    """Log-sum-exp over the valid rows or columns; 0, without a gradient, over empty ones."""
    filled = x.masked_fill(~valid.unsqueeze(dim), 0.0)
    return filled.logsumexp(dim).masked_fill(~valid, 0.0)
