"""Kaggle's Dogs vs. Cats as tensors: decoded once at each size, then mapped into memory.

Kaggle has 12,500 photographs of each; any selection with two of each will do. Its own test images have no labels, so a
fixed fifth of these is kept for testing.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.images import Images, ImageSet, stratified_split
from sinkformers.lab.data.sets.photographs import CLASSES, Photograph, open_photographs
from sinkformers.lab.data.store.decoded import find_decoded, keep_decoded
from sinkformers.lab.data.store.folder import AnyPath, path_of, user_cache
from sinkformers.lab.data.store.progress import Progress, reported

CHUNK = 256
MOST_WORKERS = 8


def load_dogs_vs_cats(folder: AnyPath, size: int, *, progress: Progress = reported) -> ImageSet:
    """The photographs below the data folder `folder`, each squeezed to (3, size, size): bilinear, antialiased.

    The first call at a size decodes them all. Later ones map the file that it left in `dogs-vs-cats/decoded`, or in the
    user's cache where the data folder is read-only. A set that has changed since is decoded again.
    """
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
    """A file name that changes with the size, with the order of the photographs, and with any one of them."""
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

    def planes(photograph: Photograph) -> bytes:
        return _decode(read(photograph), photograph, size)

    # Pillow decodes and resizes without the interpreter's lock, so threads serve.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_WORKERS)) as pool:
        for start in range(0, len(photographs), CHUNK):
            yield from pool.map(planes, photographs[start : start + CHUNK])
            progress("decoding photographs", min(start + CHUNK, len(photographs)), len(photographs))


def _decode(content: bytes, photograph: Photograph, size: int) -> bytes:
    """The red, green and blue plane of a JPEG, size × size bytes each."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            squeezed = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    # What damaged bytes make Pillow raise is not documented, and is many things.
    except Exception as error:
        raise DataError(f"{photograph.place} is not a readable JPEG; replace it, or take it out of the set.") from error
    return b"".join(band.tobytes() for band in squeezed.split())
