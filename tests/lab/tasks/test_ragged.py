"""Ragged sequences are returned exactly; batches hold every example once, with similar lengths."""

import itertools

import pytest
import torch

from sinkformers.lab.tasks.ragged import Ragged, even_batches, token_batches


def lengths(n, longest=97):
    return torch.randint(1, longest, (n,), generator=torch.Generator().manual_seed(3))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_sequences_come_out_padded_with_their_mask():
    sequences = [[7, 5, 6], [9], [], [4, 8]]
    ragged = Ragged(sequences)
    assert (len(ragged), ragged.lengths.tolist()) == (4, [3, 1, 0, 2])
    ids, mask = ragged.padded(torch.tensor([3, 1, 2]))
    assert ids.tolist() == [[4, 8], [9, 0], [0, 0]]
    assert mask.tolist() == [[True, True], [True, False], [False, False]]
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("make", [lambda n, g: even_batches(n, 7, g), lambda n, g: token_batches(n, 300, g)])
def test_every_example_is_in_one_batch_and_the_generator_decides(make):
    of = lengths(1009)
    first, again, other = (make(of, seeded(seed)) for seed in (1, 1, 2))
    assert torch.cat(first).sort().values.tolist() == list(range(1009))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.cat(first), torch.cat(other))
    # Batches are not in the order of their lengths, and neighbours are together.
    longest = torch.tensor([int(of[batch].max()) for batch in first])
    assert not torch.equal(longest, longest.sort().values)
    padded = sum(len(batch) * int(of[batch].max()) for batch in first)
    assert padded < 1.2 * int(of.sum())


def test_even_batches_are_even():
    sizes = sorted(len(batch) for batch in even_batches(lengths(1009), 7, seeded(0)))
    assert sizes == [1] + [7] * 144


def test_token_batches_are_full_but_not_larger_than_allowed():
    of = lengths(1009)
    batches = token_batches(of, 300, seeded(0))
    assert all(len(batch) * int(of[batch].max()) <= 300 for batch in batches)
    by_length = sorted(batches, key=lambda batch: (int(of[batch].min()), int(of[batch].max())))
    for batch, following in itertools.pairwise(by_length):
        assert (len(batch) + 1) * int(of[following].min()) > 300


def test_a_sentence_longer_than_a_batch_has_its_own_batch():
    batches = token_batches(torch.tensor([3, 50, 4]), 10, seeded(0))
    assert sorted(batch.tolist() for batch in batches if len(batch) == 1) == [[1]]
    assert sum(map(len, batches)) == 3
