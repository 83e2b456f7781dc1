"""Associative recall, generated: pairs of a key and a value, then the keys again, each followed by its value.

A model can predict the second half only by looking up what followed the same key before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkformers.lab.data.texts import SequenceSet

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEYS = 32  # tokens 0 to 31 are keys, and as many after them are values
TRAIN, TEST = 32_768, 1_024
SEED = 0


def load_recall(pairs: int) -> SequenceSet:
    """Load 32,768 sequences for training and 1,024 for testing, of 4·`pairs` tokens each.

    The keys of a sequence differ from each other; values may repeat. The values of the second half are predicted.

    Examples:
        >>> from sinkformers.lab.data import load_recall
        >>> sequences = load_recall(3)
        >>> sequences.train.shape, sequences.predicted.nonzero().flatten().tolist()
        (torch.Size([32768, 12]), [7, 9, 11])
    """
    import torch

    if not 1 <= pairs <= KEYS:
        raise ValueError(f"load_recall: pairs must be from 1 to {KEYS}, the number of keys; got {pairs}.")
    generator = torch.Generator().manual_seed(SEED)
    sequences = _drawn(TRAIN + TEST, pairs, generator)
    places = torch.arange(4 * pairs)
    return SequenceSet(sequences[:TRAIN], sequences[TRAIN:], (places >= 2 * pairs) & (places % 2 == 1), "recall")


def _drawn(count: int, pairs: int, generator: torch.Generator) -> Tensor:
    import torch

    keys = torch.rand(count, KEYS, generator=generator).argsort(-1)[:, :pairs]
    values = KEYS + torch.randint(KEYS, (count, pairs), generator=generator)
    again = torch.rand(count, pairs, generator=generator).argsort(-1)
    first = torch.stack([keys, values], -1).flatten(1)
    second = torch.stack([keys.gather(1, again), values.gather(1, again)], -1).flatten(1)
    return torch.cat([first, second], 1)
