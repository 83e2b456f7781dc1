"""The exact weights and the exact gradient of the steps taken, in the kernel domain where that is safe.

The domain is chosen per matrix, from its own scalings; matrices of one batch do not affect each other.
"""

from torch import Tensor

from sinkformers.core import kernel_domain, log_domain
from sinkformers.core.definition import Definition
from sinkformers.core.problem import Problem
from sinkformers.core.state import State


def forward(problem: Problem, tau: Tensor | None, definition: Definition) -> tuple[Tensor, State]:
    """Weights (..., n, m), and the vectors that `recompute_weights` and `backward` need."""
    r = kernel_domain.row_shift(problem)
    kernel = kernel_domain.exponentiate(problem.scores, r)
    state = kernel_domain.iterate(kernel, problem, tau, r, definition)
    u, v = kernel_domain.scalings(state, problem, tau)
    weights = kernel.mul_(u[..., None]).mul_(v[..., None, :])
    return _with_log_domain(weights, problem, tau, definition, state.safe), state


def recompute_weights(
    problem: Problem, tau: Tensor | None, definition: Definition, state: State
) -> tuple[Tensor, Tensor]:
    """The weights from the state alone, and the kernel they are made from."""
    kernel = kernel_domain.exponentiate(problem.scores, state.shift)
    u, v = kernel_domain.scalings(state, problem, tau)
    weights = (kernel * u[..., None]).mul_(v[..., None, :])
    return _with_log_domain(weights, problem, tau, definition, state.safe), kernel


def backward(
    problem: Problem,
    tau: Tensor | None,
    definition: Definition,
    state: State,
    kernel: Tensor,
    weights: Tensor,
    d_weights: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the scores (..., n, m) and of tau (...). Overwrites the kernel.

    `d_weights` is finite where an entry is masked: NaN times the zero there would spoil its row and column.
    """
    grad = weights * d_weights
    adjoint = kernel_domain.walk_back(kernel, problem, tau, definition, state, grad.sum(-1), grad.sum(-2))
    grad -= kernel.mul_(adjoint.x.mT @ adjoint.y)
    d_tau, safe = adjoint.tau, state.safe & adjoint.safe
    if not safe.all():
        part, part_tau = select_part(problem, tau, ~safe)
        grad[~safe], part_d_tau = log_domain.gradient(part, part_tau, definition, d_weights[~safe])
        if d_tau is not None and part_d_tau is not None:
            d_tau[~safe] = part_d_tau
    return grad, d_tau


def column_excess(problem: Problem, tau: Tensor | None, definition: Definition, state: State) -> Tensor:
    """Log of the columns' sums over their targets (..., m), as the last column step found them."""
    excess = kernel_domain.col_excess(state.cols[..., -1, :], problem)
    if not state.safe.all():
        part, part_tau = select_part(problem, tau, ~state.safe)
        excess[~state.safe] = log_domain.potentials(part, part_tau, definition).excess[-1]
    return excess


def _with_log_domain(
    weights: Tensor, problem: Problem, tau: Tensor | None, definition: Definition, safe: Tensor
) -> Tensor:
    if not safe.all():
        part, part_tau = select_part(problem, tau, ~safe)
        weights[~safe] = log_domain.weights(log_domain.potentials(part, part_tau, definition), part, part_tau)
    return weights


def select_part(problem: Problem, tau: Tensor | None, which: Tensor) -> tuple[Problem, Tensor | None]:
    """The matrices where `which` (...) holds, stacked along one leading axis, with their `tau`."""
    return problem.select(which), tau if tau is None else tau.expand(which.shape)[which]
