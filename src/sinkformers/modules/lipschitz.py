"""Lipschitz bounds of tied L2 attention: bounds on the Jacobian of `q ↦ P q`, for any tokens and any scale.

`P` normalises `exp(−½·scale·|q_i − q_j|²)`, by rows once or to the doubly stochastic limit, and the values are the
queries themselves. Both bounds depend on the number of tokens only; docs/layers.md derives them.
"""

import torch
from torch import Tensor


def softmax_bound(count: Tensor) -> Tensor:
    """Return the bound for one row normalisation: n^¼ + 2M + 2√(MR).

    `M` and `R` are the largest means of t = ½·scale·|q_i − q_j|². `M` is that of a row, the solution of
    M·exp(M + 1) = n − 1. `R` bounds that of a column, whose weights sum to √n at most.
    """
    row = count.log()
    for _ in range(8):  # Newton's method from above on a convex function: a bound at every step
        power = torch.exp(row + 1)
        row = row - (row * power - (count - 1)) / (power * (row + 1))
    column = _largest_mean(count, count.sqrt())
    return count.pow(0.25) + 2 * row + 2 * (row * column).sqrt()


def limit_bound(count: Tensor) -> Tensor:
    """Return the bound for the doubly stochastic limit: 1 + 4R, `R` the largest mean of t over a row.

    From n = 4 on, R = log(n − 1).
    """
    return 1 + 4 * _largest_mean(count, torch.ones_like(count))


def _largest_mean(count: Tensor, total: Tensor) -> Tensor:
    """Return a bound of Σ p t over `count` weights p ≤ exp(−t) that sum to `total` at most; one of them has t = 0.

    For any c ≥ 0, Σ p t ≤ c·total + Σ (t − c) exp(−t), and no term of the second sum exceeds exp(−c − 1).
    """
    c = (((count - 1) / total).log() - 1).clamp_min(0.0)
    return c * total + (count - 1) * torch.exp(-c - 1)
