"""Scikit-learn's digits: real handwriting that comes with an installed library, for runs without a download."""

from __future__ import annotations

from typing import Any

import torch

from sinkformers.lab.data.error import missing_library
from sinkformers.lab.data.images import Images, ImageSet, stratified_split

INK_LEVELS = 16


def load_digits() -> ImageSet:
    """1,797 digits of 8 × 8 pixels, 1,438 to train on and 359 to test with, by a fixed stratified split.

    The original counts ink in steps 0 to 16; here step k is round(255 k / 16), so that pixels are uint8 as in MNIST.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise missing_library("scikit-learn", "the digits set") from error

    bunch: Any = datasets.load_digits()
    ink = torch.from_numpy(bunch.images)[:, None]
    pixels = (ink * 255 / INK_LEVELS).round().to(torch.uint8)
    labels = torch.from_numpy(bunch.target).long()
    train, test = stratified_split(labels)
    return ImageSet(
        train=Images(pixels[train], labels[train]),
        test=Images(pixels[test], labels[test]),
        classes=tuple("0123456789"),
        name="digits",
    )
