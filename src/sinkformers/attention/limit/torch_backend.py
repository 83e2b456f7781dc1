"""Attention at the limit in torch's own operations, for every device."""

import torch
from torch import Tensor

from sinkformers.attention.call import AttentionCall
from sinkformers.attention.kernel_domain import token_gradients
from sinkformers.attention.limit.call import LimitAttentionCall, LimitAttentionResult
from sinkformers.attention.log_domain import through_values
from sinkformers.attention.masks import zero_masked
from sinkformers.core import implicit
from sinkformers.core.backend import Backend
from sinkformers.core.kernel_domain import row_shift
from sinkformers.core.limit_iteration import tolerance_floor
from sinkformers.core.limit_solver import column_excess, converge


class Torch(Backend):
    name = "torch"

    def why_not(self, call: LimitAttentionCall) -> str | None:
        return None

    def forward(self, call: LimitAttentionCall) -> LimitAttentionResult:
        tokens, masks = call.attention().in_working_dtype().without_masked_tokens()
        problem = tokens.problem(masks)
        *lead, n, m = problem.scores.shape
        shift = row_shift(problem)
        problem = problem._replace(scores=problem.shifted()).map(
            lambda part: part.reshape(-1, *part.shape[len(lead) :])
        )
        tau = None if tokens.tau is None else tokens.tau.reshape(-1)
        goal = torch.full_like(problem.target[..., 0], goal_of(call.tol, problem.scores.dtype, n, m))
        found = converge(problem, tau, goal, call.max_iters, newton=True, bounds_weights=False)
        parts = (found.weights, found.f, found.g, found.residual, found.products, found.converged)
        weights, f, g, *evidence = (part.reshape((*lead, *part.shape[1:])) for part in parts)
        dropout = tokens.dropout_mask()
        out = (weights if dropout is None else weights * dropout) @ tokens.value
        return LimitAttentionResult(zero_masked(out, masks.queries), f - shift, g, *evidence)

    def backward(
        self, call: LimitAttentionCall, result: LimitAttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        tokens = call.attention().in_working_dtype()
        d_out = d_output.to(tokens.query.dtype)
        return gradients(tokens, result.f, result.g, d_out, call.tol, needs_bias=needed["bias"])


def goal_of(tol: float, dtype: torch.dtype, n: int, m: int) -> float:
    """The tolerance, no smaller than rounding lets column sums become."""
    return max(tol, tolerance_floor(dtype, n, m))


def gradients(
    tokens: AttentionCall, f: Tensor, g: Tensor, d_out: Tensor, tol: float, *, needs_bias: bool
) -> dict[str, Tensor | None]:
    """The gradients at the potentials of the limit."""
    tokens, masks = tokens.without_masked_tokens()
    problem = tokens.problem(masks)
    d_out = d_out.masked_fill(~problem.rows[..., None], 0.0)
    weights = problem.scores.add_(f[..., None]).add_(g[..., None, :]).exp_()
    d_weights, d_value = through_values(tokens, weights, d_out)
    excess = column_excess(weights, g, problem)
    grad, d_tau = implicit.gradient(weights, d_weights, None, tokens.tau, excess, tol)
    return token_gradients(grad, d_value, d_tau, tokens, masks, needs_bias=needs_bias)._asdict()
