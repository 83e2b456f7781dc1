"""A call of attention: the description from which its operators and the arguments of its kernels are derived."""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sinkformers.attention.dropout import dropout_mask
from sinkformers.attention.masks import CombinedMasks, centred, combine, zero_masked
from sinkformers.core.definition import Definition
from sinkformers.core.description import SHARED, per_matrix, select
from sinkformers.core.problem import Problem, pose_unweighted, working_dtype
from sinkformers.core.state import State

_WORKING_DTYPES = (torch.float32, torch.float64)


class AttentionCall(NamedTuple):
    """Tokens, masks and settings, as the backends receive them.

    Masks, bias and tau have the rank of the scores, less the axes that they lack, with sizes of 1 where they repeat.
    """

    query: Annotated[Tensor, per_matrix("n", "d", gradient=True)]
    key: Annotated[Tensor, per_matrix("m", "d", gradient=True)]
    value: Annotated[Tensor, per_matrix("m", "e", gradient=True)]
    bias: Annotated[Tensor | None, per_matrix("n", "m", gradient=True)]  # added to the scores; see `masked_bias`
    entries: Annotated[Tensor | None, per_matrix("n", "m")]  # bool, True where an entry is valid
    queries: Annotated[Tensor | None, per_matrix("n")]  # bool
    keys: Annotated[Tensor | None, per_matrix("m")]  # bool
    tau: Annotated[Tensor | None, per_matrix(gradient=True)]  # None for 1
    seed: Annotated[Tensor | None, SHARED]  # of dropout; None for no dropout
    heads: Annotated[Tensor | None, per_matrix()]  # number of each head for dropout; None for their order
    n_iters: int
    scale: float
    l2: bool
    dropout_p: float
    implicit: bool  # the gradient of the limit instead of that of the steps

    def change(self, **fields: Any) -> "AttentionCall":
        """The call with some fields changed. `_replace` cannot be traced by Dynamo of older releases."""
        values = zip(self._fields, self, strict=True)
        return AttentionCall(*[fields.get(name, value) for name, value in values])

    def definition(self) -> Definition:
        return Definition(self.n_iters)

    def in_working_dtype(self) -> "AttentionCall":
        """The tokens in the dtype of the steps, `tau` per head, and for the L2 cost the centre removed."""
        if self.tau is None and not self.l2 and self.query.dtype in _WORKING_DTYPES:
            return self
        dtype = working_dtype(self.query.dtype)
        query, key, value = self.query.to(dtype), self.key.to(dtype), self.value.to(dtype)
        if self.l2:
            query, key = centred(query, key, combine(self).keys)
        tau = None if self.tau is None else self.tau.to(query.device, dtype).expand(query.shape[:-2])
        return self.change(query=query, key=key, value=value, tau=tau)

    def select(self, which: Tensor) -> "AttentionCall":
        """The heads where `which` (...) holds, stacked along one leading axis."""
        return select(self.numbered(which), which)

    def numbered(self, heads: Tensor) -> "AttentionCall":
        """The call with the heads (...) numbered for dropout, if there is any, so that a selection draws the same."""
        if self.seed is None or self.heads is not None:
            return self
        return self.change(heads=torch.arange(heads.numel(), device=heads.device).reshape(heads.shape))

    def without_masked_tokens(self) -> tuple["AttentionCall", CombinedMasks]:
        """The call with masked tokens set to zero; and the combined masks."""
        masks = combine(self)
        query, key = zero_masked(self.query, masks.queries), zero_masked(self.key, masks.keys)
        return self.change(query=query, key=key, value=zero_masked(self.value, masks.keys)), masks

    def problem(self, masks: CombinedMasks) -> Problem:
        """The scores, of a call without masked tokens."""
        return attention_problem(self.query, self.key, masks, self.scale, self.l2)

    def dropout_mask(self) -> Tensor | None:
        """The factors of the weights, (..., n, m); None without dropout."""
        if self.seed is None:
            return None
        (*lead, n, _), m = self.query.shape, self.key.shape[-2]
        return dropout_mask(self.seed, self.heads, lead, n, m, self.dropout_p, self.query)


class AttentionResult(NamedTuple):
    """The output in the dtype of the steps, and their state.

    The output of half-precision tokens is saved in float32: backward subtracts its product with the incoming gradient
    from numbers nearly as large, which would magnify its rounding.
    """

    out: Annotated[Tensor, per_matrix("n", "e")]
    rows: Annotated[Tensor, per_matrix("row steps", "n")]
    cols: Annotated[Tensor, per_matrix("column steps", "m")]
    shift: Annotated[Tensor, per_matrix("n")]
    safe: Annotated[Tensor, per_matrix()]

    def state(self) -> State:
        return State(self.rows, self.cols, self.shift, self.safe)


class Gradients(NamedTuple):
    """The gradients of a call in the kernel domain or in the log domain."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None  # (..., n, m); None where it is not needed
    tau: Tensor | None  # (...)


def attention_problem(query: Tensor, key: Tensor, masks: CombinedMasks, scale: float, l2: bool) -> Problem:
    """The scores of queries and keys whose masked tokens are zero."""
    scores = (query * scale) @ key.mT
    if l2:  # |q|² shifts whole rows, which no weight depends on
        scores = scores - (0.5 * scale) * key.square().sum(-1)[..., None, :]
    if masks.bias is not None:
        scores = scores + masks.bias.to(scores.dtype)
    if masks.entries is not None:
        scores = scores.masked_fill(~masks.entries, -torch.inf)
    lead, n, m = scores.shape[:-2], scores.shape[-2], scores.shape[-1]
    all_valid = torch.ones((), dtype=torch.bool, device=scores.device)
    rows = (all_valid if masks.queries is None else masks.queries).expand(*lead, n)
    cols = (all_valid if masks.keys is None else masks.keys).expand(*lead, m)
    return pose_unweighted(scores, rows, cols)
