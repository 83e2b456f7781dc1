"""Masks and biases with one row for all queries, whose columns are this rank's keys: gathered to those of all keys."""

from typing import Any

import torch
from torch import Tensor

from sinkformers.attention.masks import Masks
from sinkformers.core.problem import working_dtype
from sinkformers.core.ranges import masked_bias
from sinkformers.distributed import Header, Ranks


def has_own_columns(headers: list[Header]) -> bool:
    """Whether the masks of entries have a row for all queries, and each rank's keys as columns."""
    given = [each for each in headers if each.has_matrix]
    return bool(given) and all(each.mask_rows == 1 and each.mask_columns == each.keys for each in given)


def with_all_columns(ranks: Ranks, headers: list[Header], masks: Masks, query: Tensor) -> Masks:
    """The masks with one bias (…, 1, m) for the keys of all ranks; ranks without one add nothing to their keys."""
    sizes = [each.keys for each in headers]
    whole = query.new_zeros(*query.shape[:-2], 1, sizes[ranks.rank], dtype=working_dtype(query.dtype))
    # Where one rank needs the gradient of its bias, all of them take part in summing it.
    whole.requires_grad_(any(each.mask_gradient for each in headers))
    if masks.bias is not None:
        masked = masks.bias.detach() <= masked_bias(masks.bias.dtype)
        whole = whole + masks.bias.masked_fill(masked, -torch.inf).to(whole.dtype)
    if masks.entries is not None:
        whole = whole.masked_fill(~masks.entries, -torch.inf)
    bias = _Gather.apply(whole.mT, ranks, sizes).mT
    return Masks(bias, None, masks.queries, masks.keys)


class _Gather(torch.autograd.Function):
    """Parts (…, n, d) of all ranks one after the other; in the backward pass, the sum over the ranks of this part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, sizes: list[int]) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, sizes
        return ranks.gather(part, sizes, "biases of keys")

    @staticmethod
    def backward(ctx: Any, whole: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ranks.scatter_sum(whole, ctx.sizes, "gradients of biases of keys"), None, None
