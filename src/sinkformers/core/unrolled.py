"""The exact weights and the exact gradient of the steps taken, in the kernel domain where that is safe.

Which domain a matrix takes is decided matrix by matrix, from its own scalings; matrices of one batch do not disturb
each other.
"""

from torch import Tensor

from sinkformers.core import kernel_domain, log_domain
from sinkformers.core.kernel_domain import Steps
from sinkformers.core.problem import Problem


def forward(problem: Problem, tau: Tensor | None, n_iters: int) -> tuple[Tensor, Steps]:
    """Weights (..., n, m), and the vectors that `reopen` and `backward` need."""
    r = kernel_domain.row_shift(problem)
    kernel = kernel_domain.exponentiate(problem.scores, r)
    steps = kernel_domain.iterate(kernel, problem, tau, r, n_iters)
    u, v = kernel_domain.scalings(steps, problem, tau)
    weights = kernel.mul_(u[..., None]).mul_(v[..., None, :])
    return _with_log_domain(weights, problem, tau, n_iters, steps.safe), steps


def reopen(problem: Problem, tau: Tensor | None, n_iters: int, steps: Steps) -> tuple[Tensor, Tensor]:
    """The weights again from the vectors alone, and the kernel they were made from."""
    kernel = kernel_domain.exponentiate(problem.scores, steps.r)
    u, v = kernel_domain.scalings(steps, problem, tau)
    weights = (kernel * u[..., None]).mul_(v[..., None, :])
    return _with_log_domain(weights, problem, tau, n_iters, steps.safe), kernel


def backward(
    problem: Problem,
    tau: Tensor | None,
    n_iters: int,
    steps: Steps,
    kernel: Tensor,
    weights: Tensor,
    d_weights: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the scores (..., n, m) and of tau (...). Overwrites the kernel.

    `d_weights` is finite where an entry is masked: NaN times the zero there would spoil its row and column.
    """
    grad = weights * d_weights
    adjoint = kernel_domain.walk_back(kernel, problem, tau, steps, grad.sum(-1), grad.sum(-2))
    grad -= kernel.mul_(adjoint.x @ adjoint.y.mT)
    d_tau, safe = adjoint.tau, steps.safe & adjoint.safe
    if not safe.all():
        part, part_tau = _select(problem, tau, ~safe)
        grad[~safe], part_d_tau = log_domain.gradient(part, part_tau, n_iters, d_weights[~safe])
        if d_tau is not None and part_d_tau is not None:
            d_tau[~safe] = part_d_tau
    return grad, d_tau


def column_excess(problem: Problem, tau: Tensor | None, n_iters: int, steps: Steps) -> Tensor:
    """Log of the columns' sums over their targets (..., m), as the last column step found them."""
    excess = kernel_domain.col_excess(steps.s[..., -1, :], problem)
    if not steps.safe.all():
        part, part_tau = _select(problem, tau, ~steps.safe)
        excess[~steps.safe] = log_domain.potentials(part, part_tau, n_iters).excess[-1]
    return excess


def _with_log_domain(weights: Tensor, problem: Problem, tau: Tensor | None, n_iters: int, safe: Tensor) -> Tensor:
    if not safe.all():
        part, part_tau = _select(problem, tau, ~safe)
        weights[~safe] = log_domain.weights(log_domain.potentials(part, part_tau, n_iters), part, part_tau)
    return weights


def _select(problem: Problem, tau: Tensor | None, which: Tensor) -> tuple[Problem, Tensor | None]:
    return problem.select(which), tau if tau is None else tau.expand(which.shape)[which]
