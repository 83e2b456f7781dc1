"""Sequences of different lengths: stored in one tensor, returned padded, batched by similar length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sinkformers.lab.tasks.vocabulary import PAD

POOL = 50  # number of batches whose examples are sorted together


class Ragged:
    """Sequences of tokens; `lengths` (n,) holds their lengths."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
        self._ends = self.lengths.cumsum(0)
        self._values = torch.tensor([value for sequence in sequences for value in sequence], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sequences `which`, padded to (b, longest of them), and a mask that is True at valid tokens."""
        lengths = self.lengths[which]
        places = torch.arange(int(lengths.max()))
        mask = places < lengths[:, None]
        at = (self._ends[which] - lengths)[:, None] + places
        return torch.where(mask, self._values[at.clamp(max=len(self._values) - 1)].long(), PAD), mask


def even_batches(lengths: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Return batches of `size` examples of similar length, each example once; one batch has the remainder.

    Examples are distributed at random into pools and sorted by length within each pool, so that batches differ between
    epochs. Then the batches are shuffled.
    """
    order = torch.randperm(len(lengths), generator=generator)
    pools = [pool[lengths[pool].argsort(stable=True)] for pool in order.split(POOL * size)]
    return _shuffled([batch for pool in pools for batch in pool.split(size)], generator)


def token_batches(lengths: Tensor, most: int, generator: torch.Generator) -> list[Tensor]:
    """Return batches of at most `most` tokens, padding included, each example once.

    `lengths` (n,) are those of the longer side. An example that is longer than `most` has a batch of its own.
    """
    order = torch.randperm(len(lengths), generator=generator)
    order = order[lengths[order].argsort(stable=True)]
    batches, start = [], 0
    for end, length in enumerate(lengths[order].tolist()):
        if end > start and (end + 1 - start) * length > most:
            batches.append(order[start:end])
            start = end
    batches.append(order[start:])
    return _shuffled(batches, generator)


def _shuffled(batches: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
