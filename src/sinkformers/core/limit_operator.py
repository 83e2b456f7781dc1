"""`sinkformers::limit`: scores to their limit as one operator, with the implicit gradient as another."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from sinkformers.core import implicit
from sinkformers.core.backend import Backend, Backends, Declined
from sinkformers.core.description import per_matrix
from sinkformers.core.limit_iteration import tolerance
from sinkformers.core.limit_solver import column_excess, converge
from sinkformers.core.operator import Operator
from sinkformers.core.problem import pose, working_dtype


class LimitCall(NamedTuple):
    """Scores, masks and masses as in `NormalizeCall`, and when to stop."""

    scores: Annotated[Tensor, per_matrix("n", "m", gradient=True, saved=False)]
    mask: Annotated[Tensor | None, per_matrix("n", "m")]
    row_mass: Annotated[Tensor | None, per_matrix("n")]
    col_mass: Annotated[Tensor | None, per_matrix("m")]
    tau: Annotated[Tensor | None, per_matrix(gradient=True)]  # None for 1
    tol: float
    max_iters: int
    newton: bool  # else Sinkhorn's iterations alone


class LimitResult(NamedTuple):
    """Weights in the dtype of the steps, and how each matrix converged."""

    weights: Annotated[Tensor, per_matrix("n", "m")]
    excess: Annotated[Tensor, per_matrix("m")]  # log of the column sums over their targets
    residual: Annotated[Tensor, per_matrix(saved=False)]
    iterations: Annotated[Tensor, per_matrix(saved=False)]
    products: Annotated[Tensor, per_matrix(saved=False)]
    converged: Annotated[Tensor, per_matrix(saved=False)]


class Torch(Backend):
    """Sinkhorn's iterations in torch's own operations."""

    name = "torch"

    def why_not(self, call: LimitCall) -> str | None:
        return None

    def forward(self, call: LimitCall) -> LimitResult:
        *lead, n, m = call.scores.shape
        problem = pose(call.scores, call.mask, call.row_mass, call.col_mass)
        flat = problem._replace(scores=problem.shifted()).map(lambda part: part.reshape(-1, *part.shape[len(lead) :]))
        tau = None if call.tau is None else call.tau.to(flat.scores).expand(lead).reshape(-1)
        goal = tolerance(call.tol, tau, flat.target[..., 0], n, m)
        found = converge(flat, tau, goal, call.max_iters, newton=call.newton, bounds_weights=True)
        excess = column_excess(found.weights, found.g, flat)
        parts = (found.weights, excess, found.residual, found.iterations, found.products, found.converged)
        return LimitResult(*(part.reshape((*lead, *part.shape[1:])) for part in parts))

    def backward(
        self, call: LimitCall, result: LimitResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        weights = result.weights
        # Only the row weights are read. Weights that underflowed to zero are valid all the same, as the masses say.
        weight = pose(torch.zeros_like(weights), call.mask, call.row_mass, call.col_mass).weight
        tau = None if call.tau is None else call.tau.to(weights)
        # NaN must not meet the zero of a masked entry: neither one in its gradient, nor one at a valid entry.
        masked = weights == 0
        d_weights = d_output.masked_fill(masked, 0.0)
        grad, d_tau = implicit.gradient(weights, d_weights, weight, tau, result.excess, call.tol)
        return {"scores": grad.masked_fill(masked, 0.0), "tau": d_tau}


BACKENDS = Backends(
    Torch(),
    Declined("native", "the compiled kernels take a finite n_iters"),
    Declined("triton", "its kernels take a finite n_iters"),
    Declined("reference", "it has the unrolled gradient only"),
)


def _fake(call: LimitCall, backend: str) -> LimitResult:
    *lead, _, m = call.scores.shape
    weights = call.scores.new_empty(call.scores.shape, dtype=working_dtype(call.scores.dtype))
    dtypes = (weights.dtype, torch.int64, torch.int64, torch.bool)
    info = [weights.new_empty(lead, dtype=dtype) for dtype in dtypes]
    return LimitResult(weights, weights.new_empty(*lead, m), *info)


limit = Operator("limit", LimitCall, LimitResult, BACKENDS, _fake)
