"""Scikit-learn's digits: handwritten digits that come with an installed library, for runs without a download."""

from __future__ import annotations

from typing import Any

from sinkformers.lab.data.error import missing_library
from sinkformers.lab.data.images import Images, ImageSet, stratified_split
from sinkformers.lab.data.store.data_set import DataSet

INK_LEVELS = 16

DATA_SET = DataSet(
    "digits",
    title="1,797 handwritten digits, 8 × 8, embedded in scikit-learn",
    licence="E. Alpaydin and C. Kaynak, UCI; CC BY 4.0",
    library="scikit-learn",
)


def load_digits() -> ImageSet:
    """Load 1,797 digits of 8 × 8 pixels: 1,438 for training and 359 for testing, by a fixed stratified split.

    The original has ink levels 0 to 16; here level k is round(255 k / 16), so that pixels are uint8 as in MNIST.
    """
    import torch

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
