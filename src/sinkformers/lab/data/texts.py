"""Texts in memory: labelled texts, and sentences with their translations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Texts(NamedTuple):
    """Texts as they were written, and the class of each, int64 (n,)."""

    texts: Sequence[str]
    labels: Tensor


class TextSet(NamedTuple):
    """A data set for classification: label k is `classes[k]`. Nothing is trained on the test part."""

    train: Texts
    test: Texts
    classes: tuple[str, ...]
    name: str


class Pairs(NamedTuple):
    """Sentences and their translations, line by line."""

    source: Sequence[str]
    target: Sequence[str]


class PairSet(NamedTuple):
    """A data set for translation from the language `source` into `target`; the first of `tests` is the usual one.

    `note` is shown with results, for example if the training part is incomplete.
    """

    train: Pairs
    valid: Pairs
    tests: Mapping[str, Pairs]
    source: str
    target: str
    name: str
    note: str = ""


class SequenceSet(NamedTuple):
    """A data set for language models: sequences of tokens (s, n), and which tokens are to be predicted, bool (n,)."""

    train: Tensor
    test: Tensor
    predicted: Tensor
    name: str
