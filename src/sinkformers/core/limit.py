"""`sinkhorn_limit`: iterate until the marginals hold, and differentiate at the fixed point."""

import warnings
from typing import Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from sinkformers.core import checks
from sinkformers.core.arguments import check_problem, empty_weights, relaxation_tensor
from sinkformers.core.backend import level_of_the_caller
from sinkformers.core.limit_iteration import tolerance
from sinkformers.core.limit_operator import BACKENDS, LimitCall, limit
from sinkformers.core.modes import readable

MOST_PRODUCTS = 1000
"""With the kernel or its transpose, before a matrix is left as it is."""


class ConvergenceWarning(UserWarning):
    """`sinkhorn_limit` or a layer stopped before its residual fell below the tolerance: at the last step, or at NaN."""


class LimitInfo(NamedTuple):
    """The evidence that comes with `sinkhorn_limit(..., return_info=True)`, one value per matrix."""

    residual: Tensor
    """For tau < 1 no weight is further than this from its limit, up to rounding; at most 1. For tau = 1 the largest
    relative error of a column sum, which bounds no error of the weights: sharp scores can leave them further away."""
    iterations: Tensor
    """Normalisations taken, always odd: the last one is over rows. A Newton step counts as one of columns and one of
    rows."""
    products: Tensor
    """Products with the kernel or its transpose, which is what the time goes into."""
    converged: Tensor
    """Whether the residual is within the tolerance, or within what rounding leaves of it where that is more. For
    tau < 1 that is about eps/(1 − tau)·√max(n, m)."""


@overload
def sinkhorn_limit(
    scores: Tensor,
    *,
    tau: float | Tensor = ...,
    tol: float = ...,
    max_iters: int = ...,
    method: str = ...,
    mask: Tensor | None = ...,
    row_mass: Tensor | None = ...,
    col_mass: Tensor | None = ...,
    return_info: Literal[False] = ...,
) -> Tensor: ...


@overload
def sinkhorn_limit(
    scores: Tensor,
    *,
    tau: float | Tensor = ...,
    tol: float = ...,
    max_iters: int = ...,
    method: str = ...,
    mask: Tensor | None = ...,
    row_mass: Tensor | None = ...,
    col_mass: Tensor | None = ...,
    return_info: Literal[True],
) -> tuple[Tensor, LimitInfo]: ...


def sinkhorn_limit(
    scores: Tensor,
    *,
    tau: float | Tensor = 1.0,
    tol: float = 1e-6,
    max_iters: int = 1000,
    method: str = "auto",
    mask: Tensor | None = None,
    row_mass: Tensor | None = None,
    col_mass: Tensor | None = None,
    return_info: bool = False,
) -> Tensor | tuple[Tensor, LimitInfo]:
    """The limit K^∞ of `sinkhorn`: the doubly stochastic matrix nearest to `exp(scores)` in relative entropy.

    Args:
        scores: (…, n, m). Minus infinity means masked.
        tau: relaxes the column steps as in `sinkhorn`; the limit is then a semi-relaxed transport plan.
        tol: between 0 and 1. Each matrix stops once its residual is below; taken no smaller than rounding lets it be
            reached.
        max_iters: the most products with `exp(scores)` or its transpose; a normalisation is one.
        method: `"newton"`, a few Sinkhorn steps and then Newton's method with conjugate gradients, or `"sinkhorn"`,
            normalisations alone. `"auto"` is Newton's method, which falls back to Sinkhorn steps where it fails.
        mask, row_mass, col_mass: as in `sinkhorn`.
        return_info: return `(weights, LimitInfo)` and leave warning to the caller.

    Returns:
        weights (…, n, m); rows sum to 1. Without `return_info`, matrices that have not converged are reported in one
        `ConvergenceWarning` with the residual reached; inside `torch.compile` and `torch.func` there is none.

    The gradient is that of the limit itself (implicit differentiation), and costs no memory per iteration. Under a mask
    that is no product of rows and columns the limit may not exist; the residual then says how far the weights are.

    Examples:
        >>> import torch, sinkformers
        >>> weights, info = sinkformers.sinkhorn_limit(torch.randn(4, 4), return_info=True)
        >>> bool(info.converged), weights.sum(-2).allclose(torch.ones(4), atol=1e-5)
        (True, True)
    """
    caller = "sinkhorn_limit"
    scores, mask, row_mass, col_mass = check_problem(caller, scores, mask, row_mass, col_mass)
    max_iters = checks.most_iterations(caller, max_iters)
    tol = checks.column_tolerance(caller, tol)
    checks.one_of(caller, "method", method, ("auto", "newton", "sinkhorn"))
    by_matrix = relaxation_tensor(checks.relaxation(caller, tau, "scores", scores), scores)
    call = LimitCall(scores, mask, row_mass, col_mass, by_matrix, tol, max_iters, method != "sinkhorn")
    if not return_info:
        return limit_weights(caller, call, "torch")
    if scores.numel() == 0:
        lead = scores.shape[:-2]
        one = scores.new_ones(lead, dtype=torch.int64)
        return empty_weights(scores, by_matrix), LimitInfo(scores.new_zeros(lead), one, one.clone(), one.bool())
    result = limit(call, BACKENDS["torch"])
    info = LimitInfo(result.residual.detach(), result.iterations, result.products, result.converged)
    return result.weights.to(scores.dtype), info


def limit_weights(caller: str, call: LimitCall, backend: str) -> Tensor:
    """The weights of a call, with a warning where they have not converged."""
    scores, chosen = call.scores, BACKENDS.choose(caller, backend, call)
    if scores.numel() == 0:
        return empty_weights(scores, call.tau)
    result = limit(call, chosen)
    warn_unconverged(caller, "matrices", tolerance(call.tol, call.tau, result.residual, *scores.shape[-2:]), result)
    return result.weights.to(scores.dtype)


class HasEvidence(Protocol):
    """A result that says how its matrices converged."""

    @property
    def residual(self) -> Tensor: ...
    @property
    def products(self) -> Tensor: ...
    @property
    def converged(self) -> Tensor: ...


def warn_unconverged(caller: str, what: str, goal: Tensor | float, result: HasEvidence) -> None:
    """Give one `ConvergenceWarning` for all the matrices, called `what`, that have not converged.

    `goal` is the tolerance, of each matrix or of all. Nothing is read in traced calls and under `torch.func`.
    """
    converged = result.converged
    if not readable(converged) or converged.all():
        return
    residual, total, lost = result.residual.detach(), converged.numel(), result.residual.isnan()
    late, goal = ~converged & ~lost, torch.as_tensor(goal).expand(converged.shape)
    sentences = []
    if late.any():
        worst = int(residual[late].argmax())
        sentences.append(
            f"{int(late.sum())} of {total} {what} have not converged after {int(result.products[late].max())} "
            f"products; the largest residual is {residual[late][worst].item():.2g}, the tolerance "
            f"{goal[late.to(goal.device)][worst].item():.2g}. Raise max_iters or tol."
        )
    if lost.any():
        sentences.append(f"{int(lost.sum())} of {total} {what} are NaN, because they hold NaN or plus infinity.")
    warnings.warn(f"{caller}: {' '.join(sentences)}", ConvergenceWarning, stacklevel=level_of_the_caller())
