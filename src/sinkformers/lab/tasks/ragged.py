"""Sequences of different lengths: kept in one tensor, taken out padded, and batched with others as long."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sinkformers.lab.tasks.vocabulary import PAD

POOL = 50  # batches whose examples are sorted together


class Ragged:
    """Sequences of numbers. `lengths` (n,) says how long each is."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
        self._ends = self.lengths.cumsum(0)
        self._values = torch.tensor([value for sequence in sequences for value in sequence], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """The sequences numbered `which`, (b, longest of them), and a mask that is True at their own numbers."""
        lengths = self.lengths[which]
        places = torch.arange(int(lengths.max()))
        mask = places < lengths[:, None]
        at = (self._ends[which] - lengths)[:, None] + places
        return torch.where(mask, self._values[at.clamp(max=len(self._values) - 1)].long(), PAD), mask


def even_batches(lengths: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """All examples once, `size` in a batch but for one that has what is left, those of a batch about as long.

    Examples are drawn into pools at random and sorted by length within each, so that batches differ from epoch to
    epoch; then the batches are put into random order.
    """
    order = torch.randperm(len(lengths), generator=generator)
    pools = [pool[lengths[pool].argsort(stable=True)] for pool in order.split(POOL * size)]
    return _shuffled([batch for pool in pools for batch in pool.split(size)], generator)


def token_batches(lengths: Tensor, most: int, generator: torch.Generator) -> list[Tensor]:
    """All examples once, in batches of at most `most` tokens, padding included; `lengths` (n,) is of the longer side.

    An example longer than that is a batch of its own.
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
