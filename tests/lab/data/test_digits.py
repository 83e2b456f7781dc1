"""Scikit-learn's digits, and the split of sets that have none."""

import sys

import pytest
import torch
from sklearn.datasets import load_digits as original

from sinkformers.lab.data import DataError, load_digits
from sinkformers.lab.data.images import stratified_split


def test_digits_are_those_of_scikit_learn_scaled_to_255():
    digits = load_digits()
    assert digits.name == "digits"
    assert digits.train.pixels.shape == (1438, 1, 8, 8)
    assert digits.test.pixels.shape == (359, 1, 8, 8)
    assert digits.train.pixels.dtype == torch.uint8
    assert digits.train.labels.dtype == torch.int64

    ink, labels = original(return_X_y=True)
    expected = sorted(
        (int(label), [int(16 * 255 * step / 256 + 0.5) for step in row]) for row, label in zip(ink, labels, strict=True)
    )
    pixels = torch.cat([digits.train.pixels, digits.test.pixels]).flatten(1).tolist()
    together = torch.cat([digits.train.labels, digits.test.labels]).tolist()
    assert sorted(zip(together, pixels, strict=True)) == expected


def test_the_split_is_fixed_and_does_not_use_the_global_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load_digits()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = load_digits()
    assert torch.equal(first.train.pixels, second.train.pixels)
    assert torch.equal(first.test.labels, second.test.labels)


def test_missing_scikit_learn_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"digits set needs scikit-learn; install .* '\.\[experiments\]'"):
        load_digits()


@pytest.mark.parametrize("counts", [(2, 2), (7, 11, 13), (100, 5)])
def test_a_fifth_of_each_class_is_for_testing(counts):
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    labels = labels[torch.randperm(len(labels))]
    train, test = stratified_split(labels)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(labels)))
    assert labels[test].bincount().tolist() == [max(1, round(count / 5)) for count in counts]
    for part in (train, test):
        assert part.tolist() == sorted(part.tolist())


def test_the_split_is_random_and_not_the_last_fifth():
    labels = torch.arange(100) % 2
    _, test = stratified_split(labels)
    assert test.tolist() != list(range(20))
    assert test.tolist() != list(range(80, 100))
