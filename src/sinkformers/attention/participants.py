"""Which entries, queries and keys take part, once every mask is combined; and the others taken out of the game.

A token out of the game is set to zero before anything is multiplied: zero times NaN would be NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """Every way to say who takes part. All have the rank of the scores, or one less where they lack an axis."""

    bias: Tensor | None  # (..., n, m) float, added to the scores; minus infinity or nearly so means masked
    entries: Tensor | None  # (..., n, m) bool
    queries: Tensor | None  # (..., n) bool
    keys: Tensor | None  # (..., m) bool

    def __bool__(self) -> bool:
        return any(mask is not None for mask in self)

    # Built anew, and not by `_replace`, which Dynamo of older releases cannot trace.
    def with_entries(self, entries: Tensor) -> "Masks":
        return Masks(self.bias, entries, self.queries, self.keys)

    def with_queries(self, queries: Tensor | None) -> "Masks":
        return Masks(self.bias, self.entries, queries, self.keys)

    def with_keys(self, keys: Tensor | None) -> "Masks":
        return Masks(self.bias, self.entries, self.queries, keys)


class Participants(NamedTuple):
    """The combined masks; None where all take part. Sizes may be 1 where they repeat."""

    bias: Tensor | None  # zero where masked
    entries: Tensor | None  # (..., n, m) bool
    queries: Tensor | None  # (..., n) bool: some entry is left
    keys: Tensor | None  # (..., m) bool


def combine(masks: Masks) -> Participants:
    """One boolean matrix from all masks, and the queries and keys that have an entry left in it."""
    bias, parts = masks.bias, []
    if bias is not None:
        # Hugging Face writes the lowest finite number for minus infinity; column steps would divide it away.
        masked = bias.detach() <= torch.finfo(bias.dtype).min / 2
        bias = bias.masked_fill(masked, 0.0)
        parts.append(~masked)
    if masks.entries is not None:
        parts.append(masks.entries)
    if masks.queries is not None:
        parts.append(masks.queries[..., None])
    if masks.keys is not None:
        parts.append(masks.keys[..., None, :])
    if not parts:
        return Participants(None, None, None, None)
    entries = parts[0]
    for part in parts[1:]:
        entries = entries & part
    if bias is not None:
        bias = bias.masked_fill(~entries, 0.0) if entries.shape == bias.shape else torch.where(entries, bias, 0.0)
    return Participants(bias, entries, entries.any(-1), entries.any(-2))


def silence(tokens: Tensor, alive: Tensor | None) -> Tensor:
    """Tokens (..., n, d) with those out of the game set to zero; so is their gradient."""
    return tokens if alive is None else tokens.masked_fill(~alive[..., None], 0.0)


def centred(query: Tensor, key: Tensor, alive: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys (..., d) less the mean key, which no distance depends on.

    The squares of an offset that all tokens share would swallow their differences. Keys out of the game do not count.
    """
    if alive is None:
        centre = key.detach().mean(-2, keepdim=True)
    else:
        count = alive.expand(key.shape[:-1]).sum(-1).clamp_min(1)
        centre = silence(key.detach(), alive).sum(-2, keepdim=True) / count[..., None, None]
    return query - centre, key - centre
