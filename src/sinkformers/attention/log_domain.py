"""Fallback to the log domain for heads whose scalings leave the floating-point range; and the implicit gradient.

Values decide here what is computed, so that it stays inside registered operators, which are not traced.
"""

from torch import Tensor

from sinkformers.attention.call import AttentionCall, Gradients
from sinkformers.attention.kernel_domain import token_gradients
from sinkformers.core import implicit, log_domain, unrolled
from sinkformers.core.state import State


def recompute_output(call: AttentionCall, out: Tensor, safe: Tensor) -> None:
    """Overwrite the outputs (..., n, e) of the heads that are not safe."""
    if safe.all():
        return
    part, masks = call.select(~safe).without_masked_tokens()
    problem = part.problem(masks)
    run = log_domain.potentials(problem, part.tau, part.definition())
    weights, dropout = log_domain.weights(run, problem, part.tau), part.dropout_mask()
    recomputed = (weights if dropout is None else weights * dropout) @ part.value
    out[~safe] = recomputed.masked_fill_(~problem.rows[..., None], 0.0)


def recompute_gradients(call: AttentionCall, d_out: Tensor, grads: Gradients, safe: Tensor) -> None:
    """Overwrite the gradients of the heads that are not safe."""
    if safe.all():
        return
    part, masks = call.select(~safe).without_masked_tokens()
    problem = part.problem(masks)
    d_out = d_out[~safe].masked_fill(~problem.rows[..., None], 0.0)
    run = log_domain.potentials(problem, part.tau, part.definition())
    weights = log_domain.weights(run, problem, part.tau)
    d_weights, d_value = through_values(part, weights, d_out)
    grad, d_tau = log_domain.gradient(problem, part.tau, part.definition(), d_weights)
    recomputed = token_gradients(grad, d_value, d_tau, part, masks, needs_bias=grads.bias is not None)
    for whole, piece in zip(grads, recomputed, strict=True):
        if whole is not None and piece is not None:
            whole[~safe] = piece


def implicit_gradients(call: AttentionCall, state: State, d_out: Tensor, *, needs_bias: bool) -> Gradients:
    """The gradient of the limit at the weights reached, from the state of the kernel domain."""
    call, masks = call.without_masked_tokens()
    problem, definition = call.problem(masks), call.definition()
    d_out = d_out.masked_fill(~problem.rows[..., None], 0.0)
    weights, _ = unrolled.recompute_weights(problem, call.tau, definition, state)
    d_weights, d_value = through_values(call, weights, d_out)
    excess = unrolled.column_excess(problem, call.tau, definition, state)
    grad, d_tau = implicit.gradient(weights, d_weights, None, call.tau, excess)
    return token_gradients(grad, d_value, d_tau, call, masks, needs_bias=needs_bias)


def through_values(call: AttentionCall, weights: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the weights (..., n, m) and of the values, from that of the output."""
    d_weights, dropout = d_out @ call.value.mT, call.dropout_mask()
    if dropout is not None:
        d_weights, weights = d_weights * dropout, weights * dropout
    return d_weights, weights.mT @ d_out
