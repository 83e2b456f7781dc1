"""Kaggle's Dogs vs. Cats as tensors: decoded once for each size, then mapped into memory.

Kaggle has 12,500 photographs of each class; any selection with at least two of each is accepted. Kaggle's own test
images have no labels, so a fixed fifth of the training images is used for testing.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.images import Images, ImageSet, stratified_split
from sinkformers.lab.data.sets.photographs import BY_HAND, CLASSES, Photograph, open_photographs
from sinkformers.lab.data.store.data_set import DataSet, list_files
from sinkformers.lab.data.store.decoded import find_decoded, keep_decoded
from sinkformers.lab.data.store.folder import AnyPath, path_of, user_cache
from sinkformers.lab.data.store.progress import Progress, report_progress

CHUNK = 256
MOST_WORKERS = 8
# A selection of 10,000 photographs; all 25,000 are accepted too.
CHECKSUMS = """
7132d26971f5240644d3edeadd2b5a10496040eef2c63fa158047c7561cee340 22641368 train.zip
"""


def describe(folder: Path, _places: Sequence[Path]) -> str:
    """Count the photographs of each class."""
    with open_photographs(folder) as (photographs, _):
        counts = [sum(photograph.label == label for photograph in photographs) for label in range(len(CLASSES))]
    return " and ".join(f"{count:,} {name}s" for count, name in zip(counts, CLASSES, strict=True))


DATA_SET = DataSet(
    "dogs-vs-cats",
    title="Kaggle's Dogs vs. Cats: 25,000 photographs, or a selection",
    licence="Kaggle's competition rules; Asirra, Microsoft Research",
    by_hand=BY_HAND,
    files=list_files("dogs-vs-cats", CHECKSUMS, varies=("train.zip",), alternatives=("dogs-vs-cats/train",)),
    describe=describe,
)


def load_dogs_vs_cats(folder: AnyPath, size: int, *, progress: Progress = report_progress) -> ImageSet:
    """Load the photographs below the data folder `folder`, each resized to (3, size, size): bilinear, antialiased.

    The first call with a size decodes all of them. Later calls map the file that it wrote to `dogs-vs-cats/decoded`, or
    to the user's cache if the data folder is read-only. A set that has changed is decoded again.
    """
    import torch

    folder = path_of("load_dogs_vs_cats", "folder", folder)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"load_dogs_vs_cats: size must be a whole number of pixels ≥ 1; got {size!r}.")
    with open_photographs(folder) as (photographs, read):
        labels = torch.tensor([photograph.label for photograph in photographs])
        train, test = stratified_split(labels)
        order = torch.cat([train, test])
        photographs = [photographs[index] for index in order.tolist()]

        places = (folder / "dogs-vs-cats" / "decoded", user_cache() / "decoded")
        name, shape = _name(photographs, size), (len(photographs), 3, size, size)
        pixels = find_decoded(places, name, shape)
        if pixels is None:
            keep_decoded(places, name, _decode_all(photographs, read, size, progress))
            pixels = find_decoded(places, name, shape)
            assert pixels is not None
    labels, n_train = labels[order], len(train)
    return ImageSet(
        train=Images(pixels[:n_train], labels[:n_train]),
        test=Images(pixels[n_train:], labels[n_train:]),
        classes=CLASSES,
        name="dogs-vs-cats",
    )


def _name(photographs: list[Photograph], size: int) -> str:
    """Return a file name that depends on the size, and on the order and content of the photographs."""
    digest = hashlib.sha256()
    for photograph in photographs:
        digest.update(f"{photograph.name} {photograph.identity}\n".encode())
    return f"dogs-vs-cats-{size}px-{digest.hexdigest()[:16]}.rgb"


def _decode_all(
    photographs: list[Photograph], read: Callable[[Photograph], bytes], size: int, progress: Progress
) -> Iterator[bytes]:
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_library("pillow", "decoding photographs") from error

    from concurrent.futures import ThreadPoolExecutor

    def planes(photograph: Photograph) -> bytes:
        return _decode(read(photograph), photograph, size)

    # Pillow releases the interpreter's lock while it decodes and resizes, so threads are enough.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_WORKERS)) as pool:
        for start in range(0, len(photographs), CHUNK):
            yield from pool.map(planes, photographs[start : start + CHUNK])
            progress("decoding photographs", min(start + CHUNK, len(photographs)), len(photographs))


def _decode(content: bytes, photograph: Photograph, size: int) -> bytes:
    """Decode a JPEG to its red, green and blue planes, size × size bytes each."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    # Pillow does not document which exceptions damaged files raise, and there are many.
    except Exception as error:
        raise DataError(f"{photograph.place} is not a readable JPEG; replace it, or remove it from the set.") from error
    return b"".join(band.tobytes() for band in resized.split())
