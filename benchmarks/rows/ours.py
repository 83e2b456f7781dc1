"""The library's own backends."""

import torch
from torch import Tensor

from benchmarks.case import Case, Inputs
from benchmarks.rows.row import Attention, Row, of_torch
from benchmarks.steps import Step, Unavailable
from sinkformers import sinkhorn_attention

LARGEST_REFERENCE = 1024


def backend(name: str) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor, case: Case, real: Tensor | None) -> Tensor:
        return sinkhorn_attention(query, key, value, n_iters=case.n_iters, query_mask=real, key_mask=real, backend=name)

    return attention


def _torch_backend(query: Tensor, key: Tensor, value: Tensor, n_iters: int, real: Tensor | None) -> Tensor:
    return sinkhorn_attention(query, key, value, n_iters=n_iters, query_mask=real, key_mask=real, backend="torch")


_torch_compiled = torch.compile(_torch_backend, dynamic=False, fullgraph=True)


def _compiled(query: Tensor, key: Tensor, value: Tensor, case: Case, real: Tensor | None) -> Tensor:
    return _torch_compiled(query, key, value, case.n_iters, real)


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
