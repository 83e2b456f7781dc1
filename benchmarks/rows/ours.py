"""The library's own backends."""

import torch
from torch import Tensor

from benchmarks.case import Case, Inputs, Masks
from benchmarks.rows.row import Attention, Row, of_torch
from benchmarks.steps import Step, Unavailable
from sinkformers import sinkhorn_attention

LARGEST_REFERENCE = 1024


def backend(name: str) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
        return _attend(query, key, value, masks.scores, masks.tokens, case.is_causal, case.iterations, case.tol, name)

    return attention


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor | None,
    tokens: Tensor | None,
    is_causal: bool,
    n_iters: int | float,
    tol: float | None,
    name: str,
) -> Tensor:
    masks = {"is_causal": is_causal, "query_mask": tokens, "key_mask": tokens}
    return sinkhorn_attention(query, key, value, scores, n_iters=n_iters, tol=tol, backend=name, **masks)


_attend_compiled = torch.compile(_attend, dynamic=False, fullgraph=True)


def _compiled(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
    given = (masks.scores, masks.tokens, case.is_causal)
    return _attend_compiled(query, key, value, *given, case.iterations, case.tol, "torch")


def _reference(inputs: Inputs) -> Step:
    if inputs.case.n > LARGEST_REFERENCE:
        raise Unavailable(f"the definition is kept short, not fast; it is timed up to n = {LARGEST_REFERENCE}")
    return of_torch(backend("reference"))(inputs)


ROWS = [
    Row("native", '**`backend="native"`**', of_torch(backend("native"))),
    Row("torch", '`backend="torch"`', of_torch(backend("torch")), matrices=6),
    Row(
        "torch-compiled",
        '`backend="torch"`, `torch.compile`',
        of_torch(_compiled),
        matrices=6,
        compiled=True,
    ),
    Row("reference", '`backend="reference"`', _reference, matrices=4, matrices_per_step=4),
]
