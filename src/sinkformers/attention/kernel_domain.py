"""Attention in torch's own operations, in the kernel domain.

Nothing here reads values, so that it can be traced; unsafe heads are left to `log_domain`.
"""

import torch
from torch import Tensor

from sinkformers.attention.call import AttentionCall, Gradients
from sinkformers.attention.masks import CombinedMasks, zero_masked
from sinkformers.core import kernel_domain
from sinkformers.core.problem import Problem
from sinkformers.core.state import State


def forward(call: AttentionCall) -> tuple[Tensor, State]:
    """Output (..., n, e) and state of a call in its working dtype."""
    call, masks = call.without_masked_tokens()
    problem = call.problem(masks)
    r = kernel_domain.row_shift(problem)
    kernel = kernel_domain.exponentiate_(problem.scores, r)
    state = kernel_domain.iterate(kernel, problem, call.tau, r, call.definition())
    u, v = _balanced(state, problem, call.tau)
    right, dropout = v * call.value, call.dropout_mask()
    out = (kernel if dropout is None else kernel.mul_(dropout)) @ right
    state = state._replace(safe=state.safe & _sums_in_range(right))
    return zero_masked(u * out, masks.queries), state  # a value that is NaN would show in rows of zeros


def backward(
    call: AttentionCall, out: Tensor, state: State, d_out: Tensor, *, needs_bias: bool, traced: bool = False
) -> tuple[Gradients, Tensor]:
    """The gradient of the steps taken, and the heads (...) for which it is safe.

    With `P = diag(u) A diag(v)` the gradient of the scores is `A ∘ (left rightᵀ − xᵀ y)`, with left = `u∘d_out` and
    right = `v∘value`, and the rank-one terms of the steps beside them in one product. The adjoints of the last
    potentials are the row sums of `d_out∘out` and of `value∘d_value`. So two matrices are all it needs.
    """
    call, masks = call.without_masked_tokens()
    d_out, out = zero_masked(d_out, masks.queries), zero_masked(out, masks.queries)
    problem = call.problem(masks)
    kernel = kernel_domain.exponentiate_(problem.scores, state.shift)
    u, v = _balanced(state, problem, call.tau)
    left, right, dropout = u * d_out, v * call.value, call.dropout_mask()
    d_value = v * ((kernel if dropout is None else kernel * dropout).mT @ left)
    df, dg = (d_out * out).sum(-1), (call.value * d_value).sum(-1)
    adjoint = kernel_domain.walk_back(kernel, problem, call.tau, call.definition(), state, df, dg)
    if traced:  # a compiler fuses all the terms into one pass; a product would take one of its own
        grad = left @ right.mT
        grad = grad if dropout is None else grad * dropout
        for x, y in zip(adjoint.x.unbind(-2), adjoint.y.unbind(-2), strict=True):
            grad = grad - x[..., None] * y[..., None, :]
        grad = grad * kernel
    elif dropout is None:
        grad = (torch.cat([left, -adjoint.x.mT], -1) @ torch.cat([right.mT, adjoint.y], -2)).mul_(kernel)
    else:
        grad = (left @ right.mT).mul_(dropout).sub_(adjoint.x.mT @ adjoint.y).mul_(kernel)
    largest = left.abs().amax((-2, -1)) * right.abs().amax((-2, -1)) * left.shape[-1]
    safe = state.safe & adjoint.safe & (largest < torch.finfo(kernel.dtype).max / 4)
    return token_gradients(grad, d_value, adjoint.tau, call, masks, needs_bias=needs_bias), safe


def token_gradients(
    grad: Tensor, d_value: Tensor, d_tau: Tensor | None, call: AttentionCall, masks: CombinedMasks, *, needs_bias: bool
) -> Gradients:
    """The gradients of a call from that of its scores."""
    d_key = grad.mT @ (call.query * call.scale)
    if call.l2:
        d_key -= call.scale * grad.sum(-2)[..., None] * call.key
    d_query = call.scale * (grad @ call.key)
    # Masked last: in a matrix that is NaN, the zeros before it were multiplied by NaN.
    if needs_bias and masks.entries is not None:
        grad = grad.masked_fill_(~masks.entries, 0.0)
    d_query, d_key, d_value = (
        zero_masked(d_query, masks.queries),
        zero_masked(d_key, masks.keys),
        zero_masked(d_value, masks.keys),
    )
    return Gradients(d_query, d_key, d_value, grad if needs_bias else None, d_tau)


def _sums_in_range(right: Tensor) -> Tensor:
    """Whether sums over the rows of `v∘value` (..., m, e), with weights up to 1, stay within range (...)."""
    return right.abs().amax((-2, -1)) * right.shape[-2] < torch.finfo(right.dtype).max / 4


def _balanced(state: State, problem: Problem, tau: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last scalings as columns (..., n, 1) and (..., m, 1), with one maximum.

    Only their products count. While these are safe, balanced scalings leave 15 orders of magnitude to what they are
    multiplied with, upwards and downwards.
    """
    u, v = kernel_domain.scalings(state, problem, tau)
    balance = (u.amax(-1, keepdim=True) / v.amax(-1, keepdim=True)).sqrt()
    balance = torch.where(problem.rows.any(-1, keepdim=True), balance, 1.0)
    return (u / balance)[..., None], (v * balance)[..., None]
