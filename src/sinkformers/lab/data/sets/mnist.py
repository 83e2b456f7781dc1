"""MNIST from its four original files, in the idx format: a big-endian header, then one byte per pixel or label.

60,000 grey images for training and 10,000 for testing, 28 × 28. The files may be gzipped or plain.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.images import Images, ImageSet
from sinkformers.lab.data.store.data_set import DataSet, list_files
from sinkformers.lab.data.store.folder import AnyPath, path_of

if TYPE_CHECKING:
    from torch import Tensor

IMAGES_MAGIC, LABELS_MAGIC = 0x803, 0x801  # unsigned bytes, in three dimensions and in one
SIDE = 28
CLASSES = tuple("0123456789")
# A header that declares more than this is damaged; trusting it would take all memory.
MOST_IMAGES = 1_000_000
FETCH = "run sinkformers data fetch mnist"
CHECKSUMS = """
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6 1648877 t10k-images-idx3-ubyte.gz
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6    4542 t10k-labels-idx1-ubyte.gz
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609 9912422 train-images-idx3-ubyte.gz
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c   28881 train-labels-idx1-ubyte.gz
"""

DATA_SET = DataSet(
    "mnist",
    title="MNIST: 70,000 handwritten digits, 28 × 28",
    licence="Y. LeCun and C. Cortes; commonly listed as CC BY-SA 3.0",
    by_hand="get the files from https://storage.googleapis.com/cvdf-datasets/mnist/ and put them into mnist/",
    files=list_files(
        "mnist",
        CHECKSUMS,
        urls=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/{name}",
            "https://storage.googleapis.com/cvdf-datasets/mnist/{name}",
        ),
        alternatives=(
            "mnist/{stem}",
            *(f"{raw}/{file}" for raw in ("mnist/MNIST/raw", "MNIST/raw") for file in ("{name}", "{stem}")),
        ),
    ),
)


def load_mnist(folder: AnyPath) -> ImageSet:
    """Load MNIST below the data folder `folder`: pixels (60000, 1, 28, 28) and (10000, 1, 28, 28)."""
    folder = path_of("load_mnist", "folder", folder)
    return ImageSet(train=_part(folder, "train"), test=_part(folder, "t10k"), classes=CLASSES, name="mnist")


def _part(folder: Path, part: str) -> Images:
    images_file = _find(folder, f"{part}-images-idx3-ubyte")
    labels_file = _find(folder, f"{part}-labels-idx1-ubyte")
    pixels = _read(images_file, IMAGES_MAGIC)
    labels = _read(labels_file, LABELS_MAGIC)
    if len(pixels) != len(labels):
        raise DataError(
            f"{images_file} contains {len(pixels)} images but {labels_file} {len(labels)} labels; "
            f"delete the one that is not from MNIST and {FETCH}."
        )
    if labels.max() >= len(CLASSES):
        raise DataError(f"{labels_file} contains the label {labels.max()} instead of 0 to 9; delete it and {FETCH}.")
    return Images(pixels[:, None], labels.long())


def _find(folder: Path, name: str) -> Path:
    if found := DATA_SET.file(f"{name}.gz").locate(folder):
        return found
    raise DataError(
        f"mnist: there is no {name}.gz in {folder / 'mnist'}; {FETCH}, or name the folder above mnist with --data."
    )


def _read(file: Path, magic: int) -> Tensor:
    """Read the bytes of an idx file in the shape that its header declares: (n, 28, 28) for images, (n,) for labels."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            return _decode(cast(BufferedIOBase, stream), file, magic)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file} is damaged ({error}); delete it and {FETCH}.") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); make it readable.") from error


def _decode(stream: BufferedIOBase, file: Path, magic: int) -> Tensor:
    import torch

    n_dimensions = magic & 0xFF
    header = stream.read(4 * (1 + n_dimensions))
    if len(header) < 4 * (1 + n_dimensions):
        raise DataError(f"{file} ends within its header; delete it and {FETCH}.")
    found, *shape = struct.unpack(f">{1 + n_dimensions}I", header)
    if found != magic:
        raise DataError(f"{file} begins with {found:#010x} instead of {magic:#010x}; delete it and {FETCH}.")
    if not 0 < shape[0] <= MOST_IMAGES or any(side != SIDE for side in shape[1:]):
        expected = " × ".join(["n", *[str(SIDE)] * (n_dimensions - 1)])
        declared = " × ".join(map(str, shape))
        raise DataError(f"{file} declares the shape {declared} instead of {expected}; delete it and {FETCH}.")
    content = bytearray(math.prod(shape))
    n_read = stream.readinto(content)
    if n_read < len(content) or stream.read(1):
        length = "shorter" if n_read < len(content) else "longer"
        raise DataError(f"{file} is {length} than its header declares; delete it and {FETCH}.")
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)
