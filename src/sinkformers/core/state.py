"""What a backend keeps of the steps for the backward pass: vectors, no matrix."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core.definition import Definition


class State(NamedTuple):
    """One vector per step, the row maxima, and the matrices for which the steps are valid.

    What the vectors are is the backend's own affair. In the kernel domain (torch, native) they are the row scalings `u`
    and the column sums `s`; in the log domain (Triton) the row potentials `f` and the logarithms of the column sums
    over their targets.
    """

    rows: Tensor  # (..., row steps, n)
    cols: Tensor  # (..., column steps, m)
    shift: Tensor  # (..., n), the row maxima of the scores
    safe: Tensor  # (...) bool


def empty_state(like: Tensor, lead: Sequence[int], n: int, m: int, definition: Definition) -> State:
    """Empty tensors of the shapes of a state, with the dtype and device of `like`."""
    rows = like.new_empty(*lead, definition.row_steps(), n)
    cols = like.new_empty(*lead, definition.col_steps(), m)
    return State(rows, cols, like.new_empty(*lead, n), like.new_empty(lead, dtype=torch.bool))


def no_state(like: Tensor, lead: Sequence[int], n: int, m: int) -> State:
    """The state of a backend that keeps nothing, and repeats the steps in the backward pass."""
    rows, cols = like.new_empty(*lead, 0, n), like.new_empty(*lead, 0, m)
    return State(rows, cols, like.new_empty(*lead, 0), like.new_ones(lead, dtype=torch.bool))
