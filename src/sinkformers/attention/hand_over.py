"""Heads whose scalings leave the floating-point range, done again on potentials; and the implicit gradient.

Here values decide what is done, so that it stays inside registered operators, which are not traced.
"""

from torch import Tensor

from sinkformers.attention.plain import Gradients, Settings, Tokens, attention_problem, token_gradients
from sinkformers.core import implicit, log_domain, unrolled
from sinkformers.core.kernel_domain import Steps


def mend_forward(out: Tensor, safe: Tensor, tokens: Tokens, settings: Settings) -> None:
    """Overwrite the outputs (..., n, e) of the heads that are not safe."""
    if safe.all():
        return
    part, who = tokens.select(~safe).silenced()
    problem = attention_problem(part.query, part.key, who, settings.scale, settings.l2)
    run = log_domain.potentials(problem, part.tau, settings.n_iters)
    weights, dropout = log_domain.weights(run, problem, part.tau), part.dropout(settings)
    mended = (weights if dropout is None else weights * dropout) @ part.value
    out[~safe] = mended.masked_fill_(~problem.rows[..., None], 0.0)


def mend_backward(grads: Gradients, safe: Tensor, d_out: Tensor, tokens: Tokens, settings: Settings) -> None:
    """Overwrite the gradients of the heads that are not safe."""
    if safe.all():
        return
    part, who = tokens.select(~safe).silenced()
    problem = attention_problem(part.query, part.key, who, settings.scale, settings.l2)
    d_out = d_out[~safe].masked_fill(~problem.rows[..., None], 0.0)
    d_weights, dropout = d_out @ part.value.mT, part.dropout(settings)
    run = log_domain.potentials(problem, part.tau, settings.n_iters)
    weights = log_domain.weights(run, problem, part.tau)
    d_value = (weights if dropout is None else weights * dropout).mT @ d_out
    if dropout is not None:
        d_weights *= dropout
    grad, d_tau = log_domain.gradient(problem, part.tau, settings.n_iters, d_weights)
    mended = token_gradients(grad, d_value, d_tau, part, who, settings, grads.scores is not None)
    for whole, piece in zip(grads, mended, strict=True):
        if whole is not None and piece is not None:
            whole[~safe] = piece


def implicit_backward(d_out: Tensor, tokens: Tokens, settings: Settings, steps: Steps, wants_bias: bool) -> Gradients:
    """The gradient of the limit at the weights reached."""
    tokens, who = tokens.silenced()
    problem = attention_problem(tokens.query, tokens.key, who, settings.scale, settings.l2)
    d_out = d_out.masked_fill(~problem.rows[..., None], 0.0)
    weights, _ = unrolled.reopen(problem, tokens.tau, settings.n_iters, steps)
    d_weights, dropout = d_out @ tokens.value.mT, tokens.dropout(settings)
    d_value = (weights if dropout is None else weights * dropout).mT @ d_out
    if dropout is not None:
        d_weights *= dropout
    excess = unrolled.column_excess(problem, tokens.tau, settings.n_iters, steps)
    grad, d_tau = implicit.gradient(weights, d_weights, None, tokens.tau, excess)
    return token_gradients(grad, d_value, d_tau, tokens, who, settings, wants_bias)
