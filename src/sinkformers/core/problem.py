"""What is to be normalised: the scores of the valid entries, and the sums that rows and columns aim at.

Masks, minus infinities and masses are brought into one form. With `C` the scores (minus infinity where an entry is
masked), `a` a weight per row and `t` a target per column:

    rows     f = −LSE_j(C + g)
    columns  g = −τ·(LSE_i(C + f + log a) − log t)
    weights  exp(C + f + g)

Without masses `a = 1` and `t` = (valid rows)/(valid columns). With masses `a` is the row mass, `t` the
column mass, and `log t` is added to the scores, which is what makes `weights = k·col_mass`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core.definition import column_target, count_valid


class Problem(NamedTuple):
    """Scores (..., n, m) in float32 or float64, minus infinity where masked; the rest are vectors along an axis."""

    scores: Tensor
    rows: Tensor  # (..., n) bool: has an entry that is not masked
    cols: Tensor  # (..., m) bool
    weight: Tensor | None  # (..., n), or None where all are 1
    target: Tensor  # (..., m)

    # Methods where properties would do: Dynamo of older releases cannot trace those of a named tuple.
    def log_weight(self) -> Tensor | float:
        return 0.0 if self.weight is None else self.weight.clamp_min(torch.finfo(self.scores.dtype).tiny).log()

    def log_target(self) -> Tensor:
        return self.target.clamp_min(torch.finfo(self.scores.dtype).tiny).log()

    def shifted(self) -> Tensor:
        """The scores, each row less its maximum, which no weight depends on.

        Finite scores stay finite: a difference beyond the range of the dtype would read as a mask.
        """
        lowest = torch.finfo(self.scores.dtype).min / 4
        top = self.scores.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)
        return (self.scores - top).clamp_min(lowest).masked_fill(self.scores == -torch.inf, -torch.inf)

    def select(self, which: Tensor) -> "Problem":
        """The matrices where `which` (...) holds, stacked along one leading axis."""
        return self.map(lambda part: part[which])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        weight = None if self.weight is None else change(self.weight)
        return Problem(change(self.scores), change(self.rows), change(self.cols), weight, change(self.target))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Iterations never run below float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pose(scores: Tensor, mask: Tensor | None, row_mass: Tensor | None, col_mass: Tensor | None) -> Problem:
    """Combine scores (..., n, m), a boolean mask and the masses, all of one rank, into a `Problem`."""
    scores = scores.to(working_dtype(scores.dtype))
    row_mass, col_mass = (mass if mass is None else mass.to(scores.dtype) for mass in (row_mass, col_mass))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if row_mass is not None:
        scores = scores.masked_fill((row_mass == 0)[..., None], -torch.inf)
    if col_mass is not None:
        scores = scores.masked_fill((col_mass == 0)[..., None, :], -torch.inf)
    # Empty rows and columns are found by their maximum, which keeps NaN: NaN at a valid entry has to come out again.
    rows, cols = scores.detach().amax(-1) != -torch.inf, scores.detach().amax(-2) != -torch.inf
    if row_mass is None and col_mass is None:
        return pose_unweighted(scores, rows, cols)
    weight = _renormalise(row_mass, rows, count_valid(rows, scores.dtype))
    target = _renormalise(col_mass, cols, count_valid(cols, scores.dtype))
    return Problem(scores + target.log()[..., None, :], rows, cols, weight, target)


def pose_unweighted(scores: Tensor, rows: Tensor, cols: Tensor) -> Problem:
    """The problem without masses, where the valid rows (..., n) and columns (..., m) are known."""
    return Problem(scores, rows, cols, None, column_target(rows, cols, scores.dtype))


def _renormalise(mass: Tensor | None, valid: Tensor, count: Tensor) -> Tensor:
    """The mass of the valid rows or columns, summing to 1; uniform where none is given."""
    if mass is None:
        return valid / count
    valid_mass = torch.where(valid, mass, 0.0)
    total = valid_mass.sum(-1, keepdim=True)
    return valid_mass / total.masked_fill(total == 0, 1.0)
