"""How far weights are from doubly stochastic."""

import torch
from torch import Tensor

from sinkformers.core import checks
from sinkformers.core.problem import working_dtype


def marginal_error(weights: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest distance of a row sum from 1, and of a column sum from (rows)/(columns), over valid entries.

    Args:
        weights: (…, n, m).
        mask: boolean, broadcasts to the weights, `True` where an entry is valid. Empty rows and columns do not count.

    Returns:
        rows, cols: each (…), float32 or float64. 0 where nothing is valid.

    Examples:
        >>> import torch, sinkformers
        >>> rows, cols = sinkformers.marginal_error(torch.eye(3))
        >>> rows.item(), cols.item()
        (0.0, 0.0)
    """
    checks.tensor("marginal_error", "weights", weights, min_dim=2)
    checks.one_device("marginal_error", "weights", weights, mask=mask)
    sums = weights.to(working_dtype(weights.dtype))
    if mask is None:
        valid = weights.new_ones(weights.shape, dtype=torch.bool)
    else:
        checks.mask("marginal_error", "mask", mask, weights.shape, "weights")
        valid = mask.expand(weights.shape)
        sums = sums.masked_fill(~valid, 0.0)
    rows, cols = valid.any(-1), valid.any(-2)
    target = rows.sum(-1, keepdim=True).to(sums.dtype) / cols.sum(-1, keepdim=True).clamp_min(1)
    return _largest(sums.sum(-1) - 1, rows), _largest(sums.sum(-2) - target, cols)


def _largest(error: Tensor, valid: Tensor) -> Tensor:
    error = error.abs().masked_fill(~valid, 0.0)
    return error.amax(-1) if error.shape[-1] else error.new_zeros(error.shape[:-1])
