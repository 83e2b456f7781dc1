"""Decoded images in memory, and the split of a set that comes without one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TEST_SHARE = 0.2
SPLIT_SEED = 0


class Images(NamedTuple):
    """Pixels, uint8 (n, channels, height, width), and the class of each image, int64 (n,)."""

    pixels: Tensor
    labels: Tensor


class ImageSet(NamedTuple):
    """A data set for classification: label k is `classes[k]`. The test part is never trained on."""

    train: Images
    test: Images
    classes: tuple[str, ...]
    name: str


def stratified_split(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of a train and a test part: a fifth of each class is for testing, at least one of its images, never all.

    The split depends on nothing but `labels` (n,), which hold every class twice or more. Within a part, the images keep
    the order that they came in.
    """
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        n_test = max(1, round(TEST_SHARE * len(members)))
        in_test[members[torch.randperm(len(members), generator=generator)[:n_test]]] = True
    return (~in_test).nonzero().flatten(), in_test.nonzero().flatten()
