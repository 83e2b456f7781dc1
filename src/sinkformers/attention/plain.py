"""Attention in torch's own operations, forward and gradient: the path of every device without a kernel.

It is also where kernels hand over the matrices that they cannot hold in range.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.dropout import kept
from sinkformers.attention.participants import Masks, Participants, combine, silence
from sinkformers.core import implicit, unrolled
from sinkformers.core.kernel_domain import Steps
from sinkformers.core.problem import Problem, pose_unweighted


class Settings(NamedTuple):
    """What a call fixes for all heads."""

    n_iters: int
    scale: float
    l2: bool
    dropout_p: float


class Tokens(NamedTuple):
    """Queries, keys and values in the dtype to work in, with the masks, `tau`, and the heads' places for dropout."""

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks
    tau: Tensor | None
    seed: Tensor | None
    heads: Tensor

    def select(self, which: Tensor) -> "Tokens":
        """The heads where `which` (...) holds, stacked along one leading axis."""

        def pick(part: Tensor | None, ending: int) -> Tensor | None:
            return part if part is None else part.expand(*which.shape, *part.shape[part.dim() - ending :])[which]

        bias, entries, queries, keys = self.masks
        masks = Masks(pick(bias, 2), pick(entries, 2), pick(queries, 1), pick(keys, 1))
        query, key, value = (x[which] for x in (self.query, self.key, self.value))
        return Tokens(query, key, value, masks, pick(self.tau, 0), self.seed, self.heads[which])


def attention_problem(query: Tensor, key: Tensor, who: Participants, scale: float, l2: bool) -> Problem:
    """The scores of silenced queries and keys, as a problem."""
    scores = (query * scale) @ key.mT
    if l2:  # |q|² shifts whole rows, which no weight depends on
        scores = scores - (0.5 * scale) * key.square().sum(-1)[..., None, :]
    if who.bias is not None:
        scores = scores + who.bias.to(scores.dtype)
    if who.entries is not None:
        scores = scores.masked_fill(~who.entries, -torch.inf)
    lead, n, m = scores.shape[:-2], scores.shape[-2], scores.shape[-1]
    everyone = torch.ones((), dtype=torch.bool, device=scores.device)
    rows = (everyone if who.queries is None else who.queries).expand(*lead, n)
    cols = (everyone if who.keys is None else who.keys).expand(*lead, m)
    return pose_unweighted(scores, rows, cols)


def _dropout(tokens: Tokens, settings: Settings, weights: Tensor) -> Tensor | None:
    if tokens.seed is None:
        return None
    n, m = weights.shape[-2:]
    return kept(tokens.seed, tokens.heads, n, m, settings.dropout_p, weights.dtype)


def forward(tokens: Tokens, settings: Settings) -> tuple[Tensor, Steps]:
    """Output (..., n, e), and the vectors that `backward` needs."""
    who = combine(tokens.masks)
    query, key, value = _silenced(tokens, who)
    problem = attention_problem(query, key, who, settings.scale, settings.l2)
    weights, steps = unrolled.forward(problem, tokens.tau, settings.n_iters)
    dropout = _dropout(tokens, settings, weights)
    out = (weights if dropout is None else weights.mul_(dropout)) @ value
    return silence(out, who.queries), steps  # a value that is NaN would show in rows of zeros


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor | None  # (..., n, m), or reduced to the bias; None where a kernel was not asked for it
    tau: Tensor | None


def backward(d_out: Tensor, tokens: Tokens, settings: Settings, steps: Steps, *, implicitly: bool) -> Gradients:
    """The gradient of the steps taken, or of the limit at the weights reached."""
    who = combine(tokens.masks)
    query, key, value = _silenced(tokens, who)
    d_out, tau, n_iters = silence(d_out, who.queries), tokens.tau, settings.n_iters
    problem = attention_problem(query, key, who, settings.scale, settings.l2)
    weights, kernel = unrolled.reopen(problem, tau, n_iters, steps)
    d_weights, dropout = d_out @ value.mT, _dropout(tokens, settings, weights)
    d_value = (weights if dropout is None else weights * dropout).mT @ d_out
    if dropout is not None:
        d_weights *= dropout
    if implicitly:
        excess = unrolled.column_excess(problem, tau, n_iters, steps)
        grad, d_tau = implicit.gradient(weights, d_weights, None, tau, excess)
    else:
        grad, d_tau = unrolled.backward(problem, tau, n_iters, steps, kernel, weights, d_weights)
    d_key = settings.scale * (grad.mT @ query)
    if settings.l2:
        d_key -= settings.scale * grad.sum(-2)[..., None] * key
    d_query = settings.scale * (grad @ key)
    # Masked last: in a matrix that is NaN, the zeros of the rest of the way were multiplied by NaN.
    if who.bias is not None and who.entries is not None:
        grad = grad.masked_fill_(~who.entries, 0.0)
    d_query, d_key, d_value = silence(d_query, who.queries), silence(d_key, who.keys), silence(d_value, who.keys)
    return Gradients(d_query, d_key, d_value, grad, d_tau)


def _silenced(tokens: Tokens, who: Participants) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens out of the game set to zero."""
    return silence(tokens.query, who.queries), silence(tokens.key, who.keys), silence(tokens.value, who.keys)


def repeat_steps(tokens: Tokens, settings: Settings) -> Steps:
    """The vectors of a forward pass that was not made here."""
    return forward(tokens, settings)[1]
