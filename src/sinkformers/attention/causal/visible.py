"""Which keys each query of a causal call sees, by blocks of rows; and the tokens that take no part."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkformers.core.ranges import masked_bias

if TYPE_CHECKING:
    from sinkformers.attention.causal.call import CausalAttentionCall


def valid_rows(call: "CausalAttentionCall", start: int, stop: int) -> Tensor:
    """Which of the visible columns each row of a block sees, (..., rows, columns), with the leading axes of masks."""
    columns = call.visible_columns(stop)
    offset = call.key.shape[-2] - call.query.shape[-2]
    device = call.query.device
    valid = torch.ones(stop - start, columns, dtype=torch.bool, device=device)
    if call.triangle:
        valid = valid.tril(start + offset)
    if call.entries is not None:
        valid = valid & part_of(call.entries, start, stop, columns)
    if call.bias is not None:
        valid = valid & _unmasked(part_of(call.bias, start, stop, columns))
    if call.queries is not None:
        queries = call.queries if call.queries.shape[-1] == 1 else call.queries[..., start:stop]
        valid = valid & queries[..., None]
    if call.keys is not None:
        keys = call.keys if call.keys.shape[-1] == 1 else call.keys[..., :columns]
        valid = valid & keys[..., None, :]
    return valid


def tokens_that_count(call: "CausalAttentionCall") -> tuple[Tensor | None, Tensor | None]:
    """The queries (..., n) that see a key, and the keys (..., m) that a query sees; None where all do.

    All masks count together, the triangle included: padding on the left sees no key, though no mask names its queries.
    """
    if call.entries is None and call.bias is None and call.queries is None and call.keys is None:
        return None, None  # under a triangle alone every query sees a key, and the last one sees them all
    if call.entries is None and call.bias is None:
        return _by_token_masks(call)
    m, queries, keys = call.key.shape[-2], [], []
    for start, stop in call.blocks():
        valid = valid_rows(call, start, stop)
        queries.append(valid.any(-1))
        keys.append(F.pad(valid.any(-2), (0, m - valid.shape[-1])))
    return torch.cat(queries, -1), torch.stack(keys).any(0)


def _by_token_masks(call: "CausalAttentionCall") -> tuple[Tensor, Tensor]:
    """The same without masks of entries, and without their matrix."""
    n, m = call.query.shape[-2], call.key.shape[-2]
    every = torch.ones((), dtype=torch.bool, device=call.query.device)
    queries = (every if call.queries is None else call.queries).expand(*_lead(call.queries), n)
    keys = (every if call.keys is None else call.keys).expand(*_lead(call.keys), m)
    if not call.triangle:
        return queries & keys.any(-1, keepdim=True), keys & queries.any(-1, keepdim=True)
    # Query i sees the keys up to i + m − n: the first m − n keys are before all queries.
    before = keys.cumsum(-1)[..., m - n :] > 0
    after = F.pad(queries.flip(-1).cumsum(-1).flip(-1) > 0, (m - n, 0))
    after[..., : m - n] = queries.any(-1, keepdim=True)
    return queries & before, keys & after


def _lead(mask: Tensor | None) -> tuple[int, ...]:
    return () if mask is None else tuple(mask.shape[:-1])


def part_of(matrix: Tensor, start: int, stop: int, columns: int) -> Tensor:
    """Some rows and columns of a matrix whose sizes are 1 where it repeats."""
    matrix = matrix if matrix.shape[-2] == 1 else matrix[..., start:stop, :]
    return matrix if matrix.shape[-1] == 1 else matrix[..., :columns]


def _unmasked(bias: Tensor) -> Tensor:
    return ~(bias.detach() <= masked_bias(bias.dtype))  # NaN is valid
