"""Causal Sinkhorn as it is specified: loops over the queries in the log domain, which other forms are compared with.

Plain Sinkhorn under a triangular mask is not causal, since the column sum of a key runs over later queries. Here row i
depends on nothing that its query may not see. In both definitions `valid` says which keys a query sees.
"""

import torch
from torch import Tensor

from sinkformers.core.definition import Definition


def streaming_reference(scores: Tensor, tau: Tensor | None, definition: Definition) -> Tensor:
    """Weights (..., n, m): each query divides out the attention that the keys have received so far.

    After a row step, the attention of row i is added to what each key has received from the rows before it. The column
    step compares that with what uniform attention under the same mask would have given the key by then.

    Args:
        scores: (..., n, m), minus infinity where masked.
        tau: (...), or None for 1.
    """
    lowest = torch.finfo(scores.dtype).min / 4
    expected = scores.new_zeros(scores[..., 0, :].shape)
    received = [torch.full_like(expected, lowest) for _ in range(definition.col_steps())]  # logarithms
    rows = []
    for row in scores.unbind(-2):
        valid = row != -torch.inf
        expected = expected + valid.to(expected) / valid.sum(-1, keepdim=True).clamp_min(1)
        row = (row - _top(row)).masked_fill(~valid, lowest)
        g = torch.zeros_like(row)
        for step, before in enumerate(received):
            attention = (row - (row + g).logsumexp(-1, keepdim=True)).masked_fill(~valid, lowest)
            # `logaddexp` has no second derivative where one of its arguments is as low as this.
            received[step] = torch.where(valid, torch.stack([before, attention]).logsumexp(0), before)
            g = (expected.clamp_min(torch.finfo(row.dtype).tiny).log() - received[step]).masked_fill(~valid, 0.0)
            g = g if tau is None else tau[..., None] * g
        rows.append((row + g).softmax(-1).masked_fill(~valid, 0.0))
    return torch.stack(rows, -2)


def prefix_reference(scores: Tensor, valid: Tensor, tau: Tensor | None, definition: Definition) -> Tensor:
    """Weights (..., n, n): row i is that of query i in plain Sinkhorn on the tokens that it sees, and itself.

    A query that sees no key is masked, and counts in no prefix.

    Args:
        scores: (..., n, n). Scores above the diagonal are read: earlier tokens look at later ones within a prefix.
        valid: (..., n, n) bool, True where a query sees a key.
    """
    lowest = torch.finfo(scores.dtype).min / 4
    scores = only_seen(scores, valid)
    rows = []
    for i in range(scores.shape[-2]):
        cols, queries = valid[..., i, :], prefix_queries(valid)[..., i, :]
        log_target = _log_share(queries, cols, scores.dtype)
        inside = scores.masked_fill(~(queries[..., None] & cols[..., None, :]), -torch.inf)
        inside = (inside - _top(inside)).clamp_min(lowest)  # by prefix: a later score may be of any size
        g = scores.new_zeros(cols.shape)
        for _ in range(definition.col_steps()):
            f = -(inside + g[..., None, :]).logsumexp(-1).masked_fill(~queries, 0.0)
            g = -((inside + f[..., None]).logsumexp(-2) - log_target).masked_fill(~cols, 0.0)
            g = g if tau is None else tau[..., None] * g
        rows.append((inside[..., i, :] + g).softmax(-1).masked_fill(~cols, 0.0))
    return torch.stack(rows, -2)


def only_seen(scores: Tensor, valid: Tensor) -> Tensor:
    """The scores (..., n, n), minus infinity where no prefix has both tokens, so that masked ones may hold anything."""
    return scores.masked_fill(~(valid.any(-1)[..., None] & valid.any(-2)[..., None, :]), -torch.inf)


def prefix_queries(valid: Tensor) -> Tensor:
    """The queries (..., n, n) that each prefix has: of the tokens that its own query sees and itself, unless masked."""
    itself = torch.eye(valid.shape[-1], dtype=torch.bool, device=valid.device)
    return (valid | itself) & valid.any(-1)[..., None, :]


def _top(scores: Tensor) -> Tensor:
    """Row maxima (..., 1), which no weight depends on; 0 for empty rows."""
    top = scores.detach().amax(-1, keepdim=True)
    return top.masked_fill(top == -torch.inf, 0.0)


def _log_share(queries: Tensor, cols: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm (..., 1) of what every column of a prefix aims at: its queries over its keys."""
    return (queries.sum(-1, keepdim=True).to(dtype) / cols.sum(-1, keepdim=True).clamp_min(1)).log()
