"""Attention in torch's own operations, in the kernel domain: the path of every device without a kernel.

Nothing here looks at values, so that it can be traced; heads that are not safe are left to `hand_over`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.dropout import kept
from sinkformers.attention.participants import Masks, Participants, combine, silence
from sinkformers.core import kernel_domain
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
    heads: Tensor | None  # with a seed only

    def select(self, which: Tensor) -> "Tokens":
        """The heads where `which` (...) holds, stacked along one leading axis."""

        def pick(part: Tensor | None, ending: int) -> Tensor | None:
            return part if part is None else part.expand((*which.shape, *part.shape[part.dim() - ending :]))[which]

        bias, entries, queries, keys = self.masks
        masks = Masks(pick(bias, 2), pick(entries, 2), pick(queries, 1), pick(keys, 1))
        query, key, value = (x[which] for x in (self.query, self.key, self.value))
        return Tokens(query, key, value, masks, pick(self.tau, 0), self.seed, pick(self.heads, 0))

    def silenced(self) -> tuple["Tokens", Participants]:
        """With the tokens out of the game set to zero; and who they are."""
        who = combine(self.masks)
        query, key, value = silence(self.query, who.queries), silence(self.key, who.keys), silence(self.value, who.keys)
        return self._replace(query=query, key=key, value=value), who

    def dropout(self, settings: Settings) -> Tensor | None:
        """What the weights are multiplied with (..., n, m)."""
        if self.seed is None or self.heads is None:
            return None
        n, m = self.query.shape[-2], self.key.shape[-2]
        return kept(self.seed, self.heads, n, m, settings.dropout_p, self.query.dtype)


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor | None  # (..., n, m), or reduced to the bias; None where a kernel was not asked for it
    tau: Tensor | None


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


def forward(tokens: Tokens, settings: Settings) -> tuple[Tensor, Steps]:
    """Output (..., n, e), and the vectors that `backward` needs."""
    tokens, who = tokens.silenced()
    problem = attention_problem(tokens.query, tokens.key, who, settings.scale, settings.l2)
    r = kernel_domain.row_shift(problem)
    kernel = kernel_domain.exponentiate_(problem.scores, r)
    steps = kernel_domain.iterate(kernel, problem, tokens.tau, r, settings.n_iters)
    u, v = _balanced(steps, problem, tokens.tau)
    right, dropout = v * tokens.value, tokens.dropout(settings)
    out = (kernel if dropout is None else kernel.mul_(dropout)) @ right
    steps = steps._replace(safe=steps.safe & _room_for_sums(right))
    return silence(u * out, who.queries), steps  # a value that is NaN would show in rows of zeros


def backward(
    d_out: Tensor,
    out: Tensor,
    tokens: Tokens,
    settings: Settings,
    steps: Steps,
    *,
    wants_bias: bool,
    traced: bool = False,
) -> tuple[Gradients, Tensor]:
    """The gradient of the steps taken, and the heads (...) for which it is safe.

    With `P = diag(u) A diag(v)` the gradient of the scores is `A ∘ (x yᵀ)`, the rank-one terms of the steps standing
    beside `u∘d_out` and `v∘value` in one product. The adjoints of the last potentials are the row sums of `d_out∘out`
    and of `value∘d_value`. So two matrices are all it needs.
    """
    tokens, who = tokens.silenced()
    d_out, out = silence(d_out, who.queries), silence(out, who.queries)
    problem = attention_problem(tokens.query, tokens.key, who, settings.scale, settings.l2)
    kernel = kernel_domain.exponentiate_(problem.scores, steps.r)
    u, v = _balanced(steps, problem, tokens.tau)
    left, right, dropout = u * d_out, v * tokens.value, tokens.dropout(settings)
    d_value = v * ((kernel if dropout is None else kernel * dropout).mT @ left)
    df, dg = (d_out * out).sum(-1), (tokens.value * d_value).sum(-1)
    adjoint = kernel_domain.walk_back(kernel, problem, tokens.tau, steps, df, dg)
    if traced:  # a compiler makes one pass of all the terms; a product would want one of its own
        grad = left @ right.mT
        grad = grad if dropout is None else grad * dropout
        for x, y in zip(adjoint.x.unbind(-1), adjoint.y.unbind(-1), strict=True):
            grad = grad - x[..., None] * y[..., None, :]
        grad = grad * kernel
    elif dropout is None:
        grad = (torch.cat([left, -adjoint.x], -1) @ torch.cat([right, adjoint.y], -1).mT).mul_(kernel)
    else:
        grad = (left @ right.mT).mul_(dropout).sub_(adjoint.x @ adjoint.y.mT).mul_(kernel)
    reach = left.abs().amax((-2, -1)) * right.abs().amax((-2, -1)) * left.shape[-1]
    safe = steps.safe & adjoint.safe & (reach < torch.finfo(kernel.dtype).max / 4)
    return token_gradients(grad, d_value, adjoint.tau, tokens, who, settings, wants_bias), safe


def token_gradients(
    grad: Tensor,
    d_value: Tensor,
    d_tau: Tensor | None,
    tokens: Tokens,
    who: Participants,
    settings: Settings,
    wants_bias: bool,
) -> Gradients:
    """From the gradient of the scores to that of all else."""
    d_key = grad.mT @ (tokens.query * settings.scale)
    if settings.l2:
        d_key -= settings.scale * grad.sum(-2)[..., None] * tokens.key
    d_query = settings.scale * (grad @ tokens.key)
    # Masked last: in a matrix that is NaN, the zeros of the rest of the way were multiplied by NaN.
    if wants_bias and who.entries is not None:
        grad = grad.masked_fill_(~who.entries, 0.0)
    d_query, d_key, d_value = silence(d_query, who.queries), silence(d_key, who.keys), silence(d_value, who.keys)
    return Gradients(d_query, d_key, d_value, grad if wants_bias else None, d_tau)


def _room_for_sums(right: Tensor) -> Tensor:
    """Whether sums over the rows of `v∘value` (..., m, e), with weights up to 1, stay within range (...)."""
    return right.abs().amax((-2, -1)) * right.shape[-2] < torch.finfo(right.dtype).max / 4


def _balanced(steps: Steps, problem: Problem, tau: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last scalings as columns (..., n, 1) and (..., m, 1), with one maximum.

    Only their products count. While these are safe, balanced scalings have room for 15 orders of magnitude in what
    they are multiplied with, upwards and downwards.
    """
    u, v = kernel_domain.scalings(steps, problem, tau)
    balance = (u.amax(-1, keepdim=True) / v.amax(-1, keepdim=True)).sqrt()
    balance = torch.where(problem.rows.any(-1, keepdim=True), balance, 1.0)
    return (u / balance)[..., None], (v * balance)[..., None]
