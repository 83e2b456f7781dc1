"""Scores to their limit: a few Sinkhorn steps, then Newton's method, each matrix by itself."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core import limit_newton
from sinkformers.core.kernel_domain import apply
from sinkformers.core.limit_iteration import Iteration
from sinkformers.core.problem import Problem

# Pairs of a column step and a row step before the first Newton step.
FIRST_PAIRS = 8
# No Newton step where so many pairs would do, at the rate of the last one.
NEAR = 8


class Limit(NamedTuple):
    """Matrices (k, n, m) at their limits, or as near as they came."""

    weights: Tensor  # (k, n, m)
    f: Tensor  # (k, n), row potentials
    g: Tensor  # (k, m), column potentials
    residual: Tensor  # (k)
    iterations: Tensor  # (k), normalisations; a Newton step counts as two
    products: Tensor  # (k), with the kernel or its transpose
    converged: Tensor  # (k) bool


class _Progress:
    """What the solver knows of each matrix that has not converged, (k)."""

    def __init__(self, run: Iteration) -> None:
        self.residual = run.residual()
        self.best, (self.best_f, self.best_g) = self.residual, run.potentials()
        self.iterations = torch.ones_like(run.place)
        self.products = torch.ones_like(run.place)
        self.pairs = torch.full_like(run.place, FIRST_PAIRS)  # left to do
        self.failures = torch.zeros_like(run.place)

    def update(self, run: Iteration) -> None:
        self.residual = run.residual()
        better = self.residual < self.best
        f, g = run.potentials()
        self.best = torch.where(better, self.residual, self.best)
        self.best_f = torch.where(better[:, None], f, self.best_f)
        self.best_g = torch.where(better[:, None], g, self.best_g)

    def keep(self, which: Tensor) -> None:
        for name, value in vars(self).items():
            setattr(self, name, value[which])


def converge(
    problem: Problem, tau: Tensor | None, tol: Tensor, max_products: int, *, newton: bool, bounds_weights: bool
) -> Limit:
    """Solve matrices (k, n, m) for tolerances `tol` (k).

    A matrix whose residual is NaN stops at once. One that has not converged has the best weights that Newton's method
    found, or the last of Sinkhorn's iterations.
    """
    found = solve(
        Iteration(problem, tau, bounds_weights=bounds_weights), _empty(problem), tol, max_products, newton=newton
    )
    # Where potentials drifted far the kernel was computed around rounded ones; rows sum to 1 all the same.
    weights = found.weights
    weights /= weights.sum(-1, keepdim=True).masked_fill_(~problem.rows[..., None], 1.0)
    weights.masked_fill_(problem.scores == -torch.inf, 0.0)
    return found


def solve(run: Iteration, found: Limit, tol: Tensor, max_products: int, *, newton: bool) -> Limit:
    """Iterate until each matrix is within its tolerance (k), and write it into `found`."""
    state = _Progress(run)
    settled, in_pairs = torch.zeros_like(found.converged), True
    for number in itertools.count():
        going = (state.residual > tol[run.place]) & (state.products + 2 <= max_products) & ~settled[run.place]
        reads = limit_newton.due(number, going)
        if reads:
            new = ~going & ~settled[run.place]
            if new.any():
                _write(found, run, state, new, best=newton)
                settled[run.place[new]] = True
                if not going.any():
                    break
                if (
                    run.shrinks and going.sum() <= going.numel() / 2
                ):  # copying the rest pays once half of the batch stands still
                    run.keep(going)
                    state.keep(going)
                    going = going[going]
            # Where each matrix is at its own phase, those in pairs go first: Newton steps are taken together.
            in_pairs = not newton or bool((going & (state.pairs > 0)).any())
        if in_pairs:
            _pair(run, state, going & (state.pairs > 0) if newton else going, tol[run.place], reads)
        else:
            _newton(run, state, going & (state.pairs <= 0), max_products)
    return found._replace(converged=found.residual <= tol)


def column_excess(weights: Tensor, g: Tensor, problem: Problem) -> Tensor:
    """`LSE_i(C + f + log a) − log t` (..., m) at these weights; 0 for empty columns. Constants in g pass to it."""
    sums = weights.sum(-2) if problem.weight is None else apply(weights.mT, problem.weight)
    return torch.where(problem.cols, sums.log() - g - problem.log_target(), 0.0)


def _pair(run: Iteration, state: _Progress, which: Tensor, tol: Tensor, reads: bool) -> None:
    before = state.residual
    run.step(which)
    if reads:
        run.absorb()
    state.update(run)
    state.products += 2 * which
    state.iterations += 2 * which
    state.pairs -= which.long()
    rate = (state.residual / before).clamp(0.01, 1 - 1e-6)
    left = (tol / state.residual).log() / rate.log()
    state.pairs = torch.where(which & (state.pairs == 0) & (left < NEAR), 2, state.pairs)


def _newton(run: Iteration, state: _Progress, which: Tensor, max_products: int) -> None:
    left = (max_products - state.products - limit_newton.OTHER_PRODUCTS).div(2, rounding_mode="floor")
    # Beyond as many steps as there are columns there is nothing left to solve for but rounding.
    most_steps = left.clamp_max(min(limit_newton.MOST_SOLVER_STEPS, run.g.shape[-1]))
    taken = which & (most_steps > 0)
    before = state.residual
    accepted, visible, products = limit_newton.step(run, taken, before, most_steps)
    run.absorb()
    state.update(run)
    state.products += products
    state.iterations += 2 * accepted
    # Near the limit rounding hides whether the function falls; then the residual has to.
    failed = taken & ~(visible | (accepted & (state.residual < before / 2)))
    state.failures += failed
    # Sinkhorn steps as a remedy: the more steps failed, the more of them, so that those cost little in all.
    state.pairs = torch.where(failed, products * (1 + state.failures), state.pairs)
    state.pairs = torch.where(which & ~taken, max_products, state.pairs)


def _empty(problem: Problem) -> Limit:
    residual = problem.target.new_zeros(problem.scores.shape[0])
    count = torch.zeros_like(residual, dtype=torch.int64)
    f, g = torch.zeros_like(problem.scores[..., 0]), torch.zeros_like(problem.target)
    return Limit(torch.empty_like(problem.scores), f, g, residual, count, count.clone(), count.bool())


def _write(found: Limit, run: Iteration, state: _Progress, which: Tensor, *, best: bool) -> None:
    """Write down the matrices where `which` (k) holds, as they are or at the best that was found of each."""
    worse = which & (state.best < state.residual) if best else torch.zeros_like(which)
    if worse.any():
        run.start_at(worse, state.best_f[worse], state.best_g[worse])
    place, (f, g) = run.place[which], run.potentials()
    found.weights[place], found.f[place], found.g[place] = run.weights()[which], f[which], g[which]
    found.residual[place] = torch.where(worse, state.best, state.residual)[which]
    found.iterations[place], found.products[place] = state.iterations[which], state.products[which]
