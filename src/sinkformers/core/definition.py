"""Which normalisations are made, in which order, and what the columns aim at."""

from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """One normalisation."""

    rows: bool  # over rows, else over columns
    number: int  # among the steps of its kind

    def is_first(self) -> bool:
        """Whether it starts from the scores alone."""
        return self.rows and self.number == 0


class Definition(NamedTuple):
    """Sinkhorn's algorithm stopped after `n_iters` normalisations: rows first, then columns, then rows, …

    Every domain (kernel, log, the reference) walks through `steps` and back, and knows by `Step` alone what to do.
    """

    n_iters: int

    # Methods where properties would do: Dynamo of older releases cannot trace those of a named tuple.
    def row_steps(self) -> int:
        return (self.n_iters + 1) // 2

    def col_steps(self) -> int:
        return self.n_iters // 2

    def ends_on_rows(self) -> bool:
        return self.row_steps() > self.col_steps()

    def steps(self) -> list[Step]:
        return [Step(number % 2 == 0, number // 2) for number in range(self.n_iters)]


def column_target(rows: Tensor, cols: Tensor, dtype: torch.dtype) -> Tensor:
    """What columns sum to without masses, (..., m): the number of valid rows over that of valid columns."""
    return (count_valid(rows, dtype) / count_valid(cols, dtype)).expand(cols.shape)


def count_valid(valid: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of valid rows or columns (..., 1), at least 1."""
    return valid.sum(-1, keepdim=True).clamp_min(1).to(dtype)
