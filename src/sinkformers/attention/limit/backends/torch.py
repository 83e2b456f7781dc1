"""Attention at the limit in torch's own operations, for every device."""

import torch
from torch import Tensor

from sinkformers.attention.call import AttentionCall, Gradients
from sinkformers.attention.kernel_domain import token_gradients
from sinkformers.attention.limit.call import LimitAttentionCall, LimitAttentionResult
from sinkformers.attention.log_domain import through_values
from sinkformers.attention.masks import zero_masked
from sinkformers.core import implicit
from sinkformers.core.backend import Backend
from sinkformers.core.kernel_domain import exponentiate_, row_shift
from sinkformers.core.limit_iteration import tolerance_floor
from sinkformers.core.limit_solver import column_excess, converge


class Torch(Backend):
    name = "torch"

    def why_not(self, call: LimitAttentionCall) -> str | None:
        return None

    def forward(self, call: LimitAttentionCall) -> LimitAttentionResult:
        return attend(call.attention().in_working_dtype(), call.tol, call.max_iters)

    def backward(
        self, call: LimitAttentionCall, result: LimitAttentionResult, d_output: Tensor, needed: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        tokens = call.attention().in_working_dtype()
        d_out = d_output.to(tokens.query.dtype)
        return gradients(tokens, result, d_out, call.tol, needs_bias=needed["bias"])._asdict()


def goal_of(tol: float, dtype: torch.dtype, n: int, m: int) -> float:
    """The tolerance, no smaller than rounding lets column sums become."""
    return max(tol, tolerance_floor(dtype, n, m))


def attend(tokens: AttentionCall, tol: float, max_iters: int) -> LimitAttentionResult:
    """Attention at the limit, for tokens in the dtype of the steps."""
    tokens, masks = tokens.without_masked_tokens()
    problem = tokens.problem(masks)
    *lead, n, m = problem.scores.shape
    shift = row_shift(problem)
    problem = problem._replace(scores=problem.shifted())
    problem = problem.map(lambda part: part.reshape(-1, *part.shape[len(lead) :]))
    tau = None if tokens.tau is None else tokens.tau.reshape(-1)
    goal = torch.full_like(problem.target[..., 0], goal_of(tol, problem.scores.dtype, n, m))
    found = converge(problem, tau, goal, max_iters, newton=True, bounds_weights=False)
    parts = (found.weights, found.f, found.g, found.residual, found.products, found.converged)
    weights, f, g, *evidence = (part.reshape((*lead, *part.shape[1:])) for part in parts)
    dropout = tokens.dropout_mask()
    out = (weights if dropout is None else weights * dropout) @ tokens.value
    out = zero_masked(out, masks.queries)
    safe = torch.zeros(lead, dtype=torch.bool, device=out.device)
    return LimitAttentionResult(out, torch.ones_like(f), torch.ones_like(g), shift - f, g, safe, *evidence)


def gradients(
    tokens: AttentionCall, result: LimitAttentionResult, d_out: Tensor, tol: float, *, needs_bias: bool
) -> Gradients:
    """The gradients at the weights of a result."""
    tokens, masks = tokens.without_masked_tokens()
    problem = tokens.problem(masks)
    d_out = d_out.masked_fill(~problem.rows[..., None], 0.0)
    kernel = exponentiate_(problem.scores.add_(result.lift[..., None, :]), result.shift)
    weights = kernel.mul_(result.u[..., None]).mul_(result.v[..., None, :])
    d_weights, d_value = through_values(tokens, weights, d_out)
    g = torch.where(problem.cols, result.lift + result.v.log(), 0.0)
    excess = column_excess(weights, g, problem)
    grad, d_tau = implicit.gradient(weights, d_weights, None, tokens.tau, excess, tol)
    return token_gradients(grad, d_value, d_tau, tokens, masks, needs_bias=needs_bias)
