"""A call of `sinkhorn`: the description from which its operators are derived."""

from typing import Annotated, NamedTuple

from torch import Tensor

from sinkformers.core.backend import Backend
from sinkformers.core.definition import Definition
from sinkformers.core.description import per_matrix
from sinkformers.core.problem import Problem, pose, working_dtype
from sinkformers.core.state import State


class NormalizeCall(NamedTuple):
    """Scores and what is to be done with them. All tensors have the leading axes of the scores, or ones instead."""

    scores: Annotated[Tensor, per_matrix("n", "m", gradient=True)]
    mask: Annotated[Tensor | None, per_matrix("n", "m")]  # bool, True where an entry is valid
    row_mass: Annotated[Tensor | None, per_matrix("n")]
    col_mass: Annotated[Tensor | None, per_matrix("m")]
    tau: Annotated[Tensor | None, per_matrix(gradient=True)]  # None for 1
    n_iters: int

    def definition(self) -> Definition:
        return Definition(self.n_iters)

    def has_masses(self) -> bool:
        return self.row_mass is not None or self.col_mass is not None

    def problem(self) -> Problem:
        return pose(self.scores, self.mask, self.row_mass, self.col_mass)

    def working_tau(self) -> Tensor | None:
        """`tau` on the device of the scores, in the dtype of the steps."""
        return None if self.tau is None else self.tau.to(self.scores.device, working_dtype(self.scores.dtype))


class NormalizeResult(NamedTuple):
    """The weights in the dtype of the scores, and the state of the steps."""

    weights: Annotated[Tensor, per_matrix("n", "m", saved=False)]
    rows: Annotated[Tensor, per_matrix("row steps", "n")]
    cols: Annotated[Tensor, per_matrix("column steps", "m")]
    shift: Annotated[Tensor, per_matrix("n")]
    safe: Annotated[Tensor, per_matrix()]

    def state(self) -> State:
        return State(self.rows, self.cols, self.shift, self.safe)


class NormalizeBackend(Backend):
    """A backend of `sinkhorn`."""

    def keeps_state(self, call: NormalizeCall) -> bool:
        """Whether `forward` returns the state of its steps; otherwise `backward` repeats them."""
        return True
