"""Combine masks into valid entries, queries and keys, and set masked tokens to zero.

They are set to zero before anything is multiplied: zero times NaN would be NaN.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sinkformers.attention.mask_values import hides_nothing
from sinkformers.core.ranges import masked_bias


class HasMasks(Protocol):
    """Anything with the masks of a call: `Masks` itself, or the call."""

    @property
    def bias(self) -> Tensor | None: ...
    @property
    def entries(self) -> Tensor | None: ...
    @property
    def queries(self) -> Tensor | None: ...
    @property
    def keys(self) -> Tensor | None: ...


class Masks(NamedTuple):
    """The masks of a call. All have the rank of the scores, or one less where they lack an axis."""

    bias: Tensor | None  # (..., n, m) float, added to the scores; at `masked_bias` and below it means masked
    entries: Tensor | None  # (..., n, m) bool
    queries: Tensor | None  # (..., n) bool
    keys: Tensor | None  # (..., m) bool

    def __bool__(self) -> bool:
        return any(mask is not None for mask in self)

    # Built by the constructor, and not by `_replace`, which Dynamo of older releases cannot trace.
    def with_entries(self, entries: Tensor) -> "Masks":
        return Masks(self.bias, entries, self.queries, self.keys)

    def with_queries(self, queries: Tensor | None) -> "Masks":
        return Masks(self.bias, self.entries, queries, self.keys)

    def with_keys(self, keys: Tensor | None) -> "Masks":
        return Masks(self.bias, self.entries, self.queries, keys)


class CombinedMasks(NamedTuple):
    """All masks of a call in one; None where all are valid. Sizes may be 1 where they repeat."""

    bias: Tensor | None  # zero where masked
    entries: Tensor | None  # (..., n, m) bool
    queries: Tensor | None  # (..., n) bool: has a valid entry
    keys: Tensor | None  # (..., m) bool


def combine(masks: HasMasks) -> CombinedMasks:
    """One boolean matrix from all masks, and the queries and keys that have a valid entry in it."""
    bias, parts = masks.bias, []
    if bias is not None and not hides_nothing(bias):
        masked = bias.detach() <= masked_bias(bias.dtype)
        bias = bias.masked_fill(masked, 0.0)
        parts.append(~masked)
    if masks.entries is not None:
        parts.append(masks.entries)
    if masks.queries is not None:
        parts.append(masks.queries[..., None])
    if masks.keys is not None:
        parts.append(masks.keys[..., None, :])
    if not parts:
        return CombinedMasks(bias, None, None, None)
    entries = parts[0]
    for part in parts[1:]:
        entries = entries & part
    if bias is not None:
        bias = bias.masked_fill(~entries, 0.0) if entries.shape == bias.shape else torch.where(entries, bias, 0.0)
    return CombinedMasks(bias, entries, entries.any(-1), entries.any(-2))


def zero_masked(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Tokens (..., n, d) with the masked ones set to zero; so is their gradient."""
    return tokens if valid is None else tokens.masked_fill(~valid[..., None], 0.0)


def centred(query: Tensor, key: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys (..., d) less the mean key, which no distance depends on.

    The squares of an offset that all tokens share would swamp their differences. Masked keys do not count.
    """
    if valid is None:
        centre = key.detach().mean(-2, keepdim=True)
    else:
        count = valid.expand(key.shape[:-1]).sum(-1).clamp_min(1)
        centre = zero_masked(key.detach(), valid).sum(-2, keepdim=True) / count[..., None, None]
    return query - centre, key - centre
