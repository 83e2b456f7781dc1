"""One image from a file, as the pixels that a model takes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.store.folder import AnyPath, path_of

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

KINDS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")  # not formats that call other programs, as EPS does
BILINEAR = 2  # Image.Resampling.BILINEAR, so that Pillow is imported only where a file is opened
LARGEST_FILE = 64 * 2**20
FIX = "convert it to PNG or JPEG, or name another"


def read_image(file: AnyPath, *, size: int, channels: int) -> tuple[Tensor, tuple[int, int]]:
    """Read an image as pixels, uint8 (channels, size, size), and the width and height that it has upright.

    The largest square in the middle is resized, bilinear and antialiased. With one channel, colours become grey.
    Transparent parts become white.
    """
    import torch

    image = open_image(file)
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    image = image.convert("L") if channels == 1 else image
    box = (left, top, left + side, top + side)
    image = image.resize((size, size), BILINEAR, box=box)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, channels)
    return pixels.movedim(-1, 0).contiguous(), (width, height)


def open_image(file: AnyPath) -> Image.Image:
    """Read an image in RGB, upright as its camera noted; transparent parts become white."""
    file = path_of("open_image", "file", file)
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise missing_library("pillow", "reading images") from error
    check_image_file(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=KINDS) as opened:
                upright = ImageOps.exif_transpose(opened)
                image = upright.convert("RGBA") if opened.has_transparency_data else upright.convert("RGB")
    # Pillow raises many kinds of errors for damaged files.
    except Exception as error:
        reason = "it is larger than an image should be" if "bomb" in str(error) else error
        raise DataError(f"{file} cannot be read as an image ({reason}); {FIX}.") from error
    if image.mode == "RGBA":
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image).convert("RGB")
    return image


def check_image_file(file: Path) -> None:
    """Check that a file can be opened, and that it is not too large."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); name an existing file.") from error
    if size > LARGEST_FILE:
        raise DataError(f"{file} is larger than {LARGEST_FILE // 2**20} MB, so it is not read; {FIX}.")
