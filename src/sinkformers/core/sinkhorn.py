"""`sinkhorn`: the operator as users call it."""

from torch import Tensor

from sinkformers.core import checks
from sinkformers.core.arguments import check_problem, empty_weights, relaxation_tensor
from sinkformers.core.call import NormalizeCall
from sinkformers.core.limit import MOST_PRODUCTS, limit_weights
from sinkformers.core.limit_operator import LimitCall
from sinkformers.core.normalize import BACKENDS, normalize
from sinkformers.core.problem import pose
from sinkformers.core.softmax import softmax


def sinkhorn(
    scores: Tensor,
    *,
    n_iters: int | float = 3,
    tau: float | Tensor = 1.0,
    mask: Tensor | None = None,
    row_mass: Tensor | None = None,
    col_mass: Tensor | None = None,
    tol: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Normalise the rows of `exp(scores)`, then its columns, then its rows, …, `n_iters` times in all.

    SoftMax stops after the first normalisation. Continuing makes the columns sum to a constant too, so that attention
    becomes doubly stochastic.

    Args:
        scores: (…, n, m), any leading axes, float16, bfloat16, float32 or float64. Minus infinity means masked.
        n_iters: how many normalisations. 1 is SoftMax; odd counts end on rows, so rows sum to 1 to rounding; even ones
            end on columns. `math.inf` is the limit, by Newton's method, as in `sinkhorn_limit`.
        tau: relaxes the column steps, from 0 (SoftMax) to 1 (Sinkhorn). A number, or a tensor that broadcasts to the
            leading axes; a tensor has a gradient. One without axes may be on the CPU, whatever the scores' device.
        mask: boolean, broadcasts to the scores, `True` where an entry is valid. Masking equals deletion: an empty row
            or column gives zeros, and what masked entries hold changes nothing.
        row_mass, col_mass: (n,) and (m,), or with leading axes; non-negative, summing to 1. Then rows sum to 1 and, at
            convergence, `row_mass @ weights = col_mass`.
        tol: with `n_iters=math.inf`, the residual at which a matrix is done, as in `sinkhorn_limit`; 1e-3 by default.
        backend: `auto`, `native`, `triton`, `torch`, or `reference`, the log-domain definition, which can be
            differentiated twice.

    Returns:
        weights (…, n, m), in the dtype of the scores (float32 under autocast, like SoftMax). Rows sum to 1, and columns
        tend to (valid rows)/(valid columns).

    The gradient is the exact one of the steps taken, and that of the limit for `n_iters=math.inf`. Beside the scores it
    keeps only vectors, a few per step; at `n_iters=1` and at the limit it keeps the weights, as SoftMax does.

    Examples:
        >>> import torch, sinkformers
        >>> weights = sinkformers.sinkhorn(torch.randn(2, 5, 5), n_iters=21)
        >>> weights.sum(-1).allclose(torch.ones(2, 5)), weights.sum(-2).allclose(torch.ones(2, 5), atol=1e-3)
        (True, True)

    The paper's own code divides by n at the end, or stops half-way; here rows sum to 1, as in the paper's text.
    """
    caller = "sinkhorn"
    scores, mask, row_mass, col_mass = check_problem(caller, scores, mask, row_mass, col_mass)
    n_iters = checks.iterations(caller, n_iters)
    tol = checks.limit_tolerance(caller, n_iters, tol)
    relaxation = checks.relaxation(caller, tau, "scores", scores)
    by_matrix = relaxation_tensor(relaxation, scores)
    if isinstance(n_iters, float):  # infinite
        call = LimitCall(scores, mask, row_mass, col_mass, by_matrix, tol, MOST_PRODUCTS, True)
        return limit_weights(caller, call, backend)
    call = NormalizeCall(scores, mask, row_mass, col_mass, by_matrix, n_iters)
    chosen = BACKENDS.choose(caller, backend, call)
    if scores.numel() == 0:
        return empty_weights(scores, relaxation)
    if backend == "auto" and isinstance(relaxation, float) and (n_iters == 1 or relaxation == 0):
        return _softmax(scores, mask, row_mass, col_mass)
    return chosen.forward(call) if chosen.composite else normalize.output(call, chosen)


def _softmax(scores: Tensor, mask: Tensor | None, row_mass: Tensor | None, col_mass: Tensor | None) -> Tensor:
    if mask is None and row_mass is None and col_mass is None:
        return softmax(scores)
    return softmax(pose(scores, mask, row_mass, col_mass).scores).to(scores.dtype)
