"""`sinkhorn_limit`: iterate until the marginals hold, and differentiate at the fixed point."""

import warnings
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from sinkformers.core import checks
from sinkformers.core.limit_iteration import tolerance
from sinkformers.core.limit_operator import BACKENDS, LimitCall, limit
from sinkformers.core.modes import readable
from sinkformers.core.sinkhorn import check_problem, empty_weights, relaxation_tensor


class ConvergenceWarning(UserWarning):
    """`sinkhorn_limit` or a layer stopped before its residual fell below the tolerance: at the last step, or at NaN."""


class LimitInfo(NamedTuple):
    """The evidence that comes with `sinkhorn_limit(..., return_info=True)`, one value per matrix."""

    residual: Tensor
    """For tau < 1 no weight is further than this from its limit, up to rounding; at most 1. For tau = 1 the largest
    relative error of a column sum, which bounds no error of the weights: sharp scores can leave them further away."""
    iterations: Tensor
    """Normalisations taken, always odd: the last one is over rows."""
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
    mask: Tensor | None = None,
    row_mass: Tensor | None = None,
    col_mass: Tensor | None = None,
    return_info: bool = False,
) -> Tensor | tuple[Tensor, LimitInfo]:
    """The limit K^∞ of `sinkhorn`: the doubly stochastic matrix nearest to `exp(scores)` in relative entropy.

    Args:
        scores: (…, n, m). Minus infinity means masked.
        tau: relaxes the column steps as in `sinkhorn`; the limit is then a semi-relaxed transport plan.
        tol: each matrix stops once its residual is below; taken no smaller than rounding lets it be reached.
        max_iters: the most normalisations to take.
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
    tol = checks.positive(caller, "tol", tol)
    by_matrix = relaxation_tensor(checks.relaxation(caller, tau, "scores", scores), scores)
    if scores.numel() == 0:
        lead = scores.shape[:-2]
        info = LimitInfo(
            scores.new_zeros(lead), scores.new_ones(lead, dtype=torch.int64), scores.new_ones(lead, dtype=torch.bool)
        )
        weights = empty_weights(scores, by_matrix)
        return (weights, info) if return_info else weights
    call = LimitCall(scores, mask, row_mass, col_mass, by_matrix, tol, max_iters)
    result = limit(call, BACKENDS["torch"])
    weights = result.weights.to(scores.dtype)
    info = LimitInfo(result.residual.detach(), result.iterations, result.converged)
    if return_info:
        return weights, info
    if readable(info.converged) and not info.converged.all():
        goal = tolerance(tol, by_matrix, info.residual, *scores.shape[-2:])
        warnings.warn(f"{caller}: {_complaint(info, goal)}", ConvergenceWarning, stacklevel=2)
    return weights


def _complaint(info: LimitInfo, goal: Tensor) -> str:
    total, lost = info.converged.numel(), info.residual.isnan()
    late = ~info.converged & ~lost
    sentences = []
    if late.any():
        worst = info.residual[late].argmax()
        sentences.append(
            f"{int(late.sum())} of {total} matrices have not converged after {int(info.iterations[late].max())} "
            f"normalisations; the largest residual is {info.residual[late][worst].item():.2g}, the tolerance "
            f"{goal[late][worst].item():.2g}. "
            "Raise max_iters, or pass return_info=True to judge each matrix."
        )
    if lost.any():
        sentences.append(
            f"{int(lost.sum())} of {total} matrices are NaN, because their scores hold NaN or plus infinity."
        )
    return " ".join(sentences)
