"""A call of causal attention: the description from which its operators are derived."""

from typing import Annotated, Any, NamedTuple

from torch import Tensor

from sinkformers.attention.call import AttentionCall
from sinkformers.attention.causal.visible import tokens_that_count
from sinkformers.attention.masks import centred
from sinkformers.core.definition import Definition
from sinkformers.core.description import SHARED, per_matrix, select


class CausalAttentionCall(NamedTuple):
    """Tokens and masks as in `AttentionCall`, and what keys have received from earlier queries.

    Rows come in blocks of `block`: between forward and backward one vector per block and column step is saved.
    """

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
    received: Annotated[Tensor | None, per_matrix("column steps", "m")]  # logarithms; None at the first query
    expected: Annotated[Tensor | None, per_matrix("m")]
    n_iters: int  # odd
    scale: float
    l2: bool
    dropout_p: float
    triangle: bool  # query i sees the keys up to i + m − n only
    streams: bool  # more queries may follow: the result needs `received` and `expected`
    block: int

    def change(self, **fields: Any) -> "CausalAttentionCall":
        values = zip(self._fields, self, strict=True)
        return CausalAttentionCall(*[fields.get(name, value) for name, value in values])

    def definition(self) -> Definition:
        return Definition(self.n_iters)

    def attention(self) -> AttentionCall:
        """The same tokens, masks and dropout in a call of plain attention."""
        return AttentionCall(*self[:10], self.n_iters, self.scale, self.l2, self.dropout_p, False)

    def in_working_dtype(self) -> "CausalAttentionCall":
        """The tokens in the dtype of the steps, `tau` per head, and for the L2 cost the centre removed."""
        call = CausalAttentionCall(*self.attention().change(l2=False).in_working_dtype()[:10], *self[10:])
        if not self.l2:
            return call
        query, key = centred(call.query, call.key, tokens_that_count(call)[1])
        return call.change(query=query, key=key)

    def select(self, which: Tensor) -> "CausalAttentionCall":
        """The heads where `which` (...) holds, stacked along one leading axis."""
        numbered = CausalAttentionCall(*self.attention().numbered(which)[:10], *self[10:])
        return select(numbered, which)

    def blocks(self) -> list[tuple[int, int]]:
        """The first row of each block, and the one after its last."""
        n = self.query.shape[-2]
        return [(start, min(n, start + self.block)) for start in range(0, n, self.block)]

    def visible_columns(self, stop: int) -> int:
        """How many of the first keys the queries before `stop` see."""
        n, m = self.query.shape[-2], self.key.shape[-2]
        return max(0, stop + m - n) if self.triangle else m


class CausalAttentionResult(NamedTuple):
    """The output in the dtype of the steps; sums over all queries so far; and sums at the start of each block.

    What `starts` holds is the backend's own affair: logarithms, or sums where that is safe.
    """

    out: Annotated[Tensor, per_matrix("n", "e")]
    received: Annotated[Tensor, per_matrix("column steps", "m", saved=False)]  # logarithms
    expected: Annotated[Tensor, per_matrix("m", saved=False)]
    starts: Annotated[Tensor, per_matrix("blocks", "column steps", "m")]
    safe: Annotated[Tensor, per_matrix()]  # bool
