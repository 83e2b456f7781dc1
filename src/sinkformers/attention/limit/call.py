"""A call of attention at the limit: the description from which its operators are derived."""

from typing import Annotated, NamedTuple

from torch import Tensor

from sinkformers.attention.call import AttentionCall
from sinkformers.core.description import SHARED, per_matrix


class LimitAttentionCall(NamedTuple):
    """Tokens and masks as in `AttentionCall`, and when to stop."""

    query: Annotated[Tensor, per_matrix("n", "d", gradient=True)]
    key: Annotated[Tensor, per_matrix("m", "d", gradient=True)]
    value: Annotated[Tensor, per_matrix("m", "e", gradient=True)]
    bias: Annotated[Tensor | None, per_matrix("n", "m", gradient=True)]
    entries: Annotated[Tensor | None, per_matrix("n", "m")]
    queries: Annotated[Tensor | None, per_matrix("n")]
    keys: Annotated[Tensor | None, per_matrix("m")]
    tau: Annotated[Tensor | None, per_matrix(gradient=True)]  # None for 1
    seed: Annotated[Tensor | None, SHARED]
    heads: Annotated[Tensor | None, per_matrix()]
    scale: float
    l2: bool
    dropout_p: float
    tol: float
    max_iters: int

    def attention(self) -> AttentionCall:
        """The same tokens, masks and dropout in a call whose weights are SoftMax."""
        tensors = self[:10]
        return AttentionCall(*tensors, 1, self.scale, self.l2, self.dropout_p, True)

    def with_attention(self, attention: AttentionCall) -> "LimitAttentionCall":
        """This call with the tokens, masks and dropout of another."""
        return LimitAttentionCall(
            *attention[:10], attention.scale, attention.l2, attention.dropout_p, self.tol, self.max_iters
        )


class LimitAttentionResult(NamedTuple):
    """The output in the dtype of the steps, what the weights are made of, and how each head converged.

    The weights are `u·exp(scores + lift − shift)·v`, and are computed again in the backward pass.
    """

    out: Annotated[Tensor, per_matrix("n", "e")]
    u: Annotated[Tensor, per_matrix("n")]
    v: Annotated[Tensor, per_matrix("m")]
    shift: Annotated[Tensor, per_matrix("n")]
    lift: Annotated[Tensor, per_matrix("m")]
    safe: Annotated[Tensor, per_matrix()]  # bool: the compiled kernels may use these vectors
    residual: Annotated[Tensor, per_matrix(saved=False)]
    products: Annotated[Tensor, per_matrix(saved=False)]
    converged: Annotated[Tensor, per_matrix(saved=False)]
