"""Decoded images in memory, and a train/test split for sets that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

TEST_SHARE = 0.2
SPLIT_SEED = 0


class Images(NamedTuple):
    """Pixels, uint8 (n, channels, height, width), and the class of each image, int64 (n,)."""

    pixels: Tensor
    labels: Tensor


class ImageSet(NamedTuple):
    """A data set for classification: label k is `classes[k]`. Nothing is trained on the test part."""

    train: Images
    test: Images
    classes: tuple[str, ...]
    name: str


def stratified_split(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of a train and a test part. The test part has a fifth of each class, and at least one image.

    The split depends on `labels` (n,) only; every class must occur at least twice. Both parts keep the order of
    `labels`.
    """
    import torch

    generator = torch.Generator().manual_seed(SPLIT_SEED)
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        n_test = max(1, round(TEST_SHARE * len(members)))
        in_test[members[torch.randperm(len(members), generator=generator)[:n_test]]] = True
    return (~in_test).nonzero().flatten(), in_test.nonzero().flatten()
