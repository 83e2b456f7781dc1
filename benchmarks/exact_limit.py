"""The limit of Sinkhorn's algorithm by dense algebra in float64: what rows at `n_iters=math.inf` are compared with.

It shares no code with the library: the Hessian is a matrix and is factorised, where the library solves with products.
"""

import torch
from torch import Tensor

FIRST_STEPS = 20  # column steps before the first Newton step
MOST_STEPS = 60
ACCURACY = 1e-11  # of the column sums


def exact_limit(scores: Tensor) -> Tensor:
    """Return the doubly stochastic weights (n, n) of scores (n, n) in float64, with the gradient of the limit.

    The last Newton step is differentiated with its Hessian held fixed. At the limit that is implicit differentiation:
    the step solves `H dg = −dc`, where c are the column sums.
    """
    with torch.no_grad():
        g = _potentials(scores)
        hessian = _hessian((scores + g).softmax(-1))
    gap = 1 - (scores + g).softmax(-1).sum(-2)
    return (scores + g + torch.linalg.solve(hessian, gap)).softmax(-1)


def column_error(weights: Tensor) -> float:
    """Return the largest deviation of a column sum from 1."""
    return (weights.sum(-2) - 1).abs().max().item()


def _potentials(scores: Tensor) -> Tensor:
    """Minimise `Σ_i LSE_j(C + g) − Σ_j g_j` over g by Newton's method with a line search."""
    g = torch.zeros_like(scores[0])
    for _ in range(FIRST_STEPS):
        g = g - (scores + g).log_softmax(-1).logsumexp(-2)
    for _ in range(MOST_STEPS):
        weights = (scores + g).softmax(-1)
        gap = 1 - weights.sum(-2)
        if gap.abs().max() <= ACCURACY:
            return g
        g = _line_search(scores, g, torch.linalg.solve(_hessian(weights), gap), gap)
    off = column_error((scores + g).softmax(-1))
    raise RuntimeError(f"exact_limit: column sums are off by {off:.1e} after {MOST_STEPS} Newton steps.")


def _line_search(scores: Tensor, g: Tensor, direction: Tensor, gap: Tensor) -> Tensor:
    value, slope = _objective(scores, g), (gap * direction).sum()
    for halvings in range(30):
        length = 0.5**halvings
        step = length * direction
        if _objective(scores, g + step) <= value - 1e-4 * length * slope + 1e-13 * value.abs():
            return g + step
    return g


def _objective(scores: Tensor, g: Tensor) -> Tensor:
    return (scores + g).logsumexp(-1).sum() - g.sum()


def _hessian(weights: Tensor) -> Tensor:
    """Return `diag(c) − PᵀP`, which is singular along the vector of ones only, made regular there."""
    hessian = weights.sum(-2).diag() - weights.mT @ weights
    return hessian + 1 / len(hessian)
