"""What attention is shown on: tokens as text, the patches of an image, or points."""

import base64
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CALLER = "view_attention"
LONGEST_TOKEN = 80  # characters
LARGEST_SIDE = 384  # pixels


def check_tokens(tokens: Any) -> list[str] | None:
    """Return the tokens as a page holds them: texts of limited length, without halves of characters."""
    if tokens is None:
        return None
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise TypeError(f"{CALLER}: tokens must be a list of texts, one per token; got {type(tokens).__name__}.")
    odd = next((each for each in tokens if not isinstance(each, str)), None)
    if odd is not None:
        raise TypeError(
            f"{CALLER}: tokens must be texts; got {odd!r} among them. A tokenizer's convert_ids_to_tokens returns them."
        )
    return [_shortened(each) for each in tokens]


def image_subject(image: Any, grid: tuple[int, int] | None, n_tokens: int, caller: str = CALLER) -> dict[str, Any]:
    """Return an image and the grid of its patches, which are the last tokens; those before are CLS and the like."""
    pixels = _pixels(image)
    height, width = pixels.shape[1:]
    rows, columns = _grid(grid, n_tokens, height, width)
    if rows * columns > n_tokens:
        raise ValueError(
            f"{caller}: grid must have as many patches as there are tokens, or fewer; got {rows}×{columns} for "
            f"{n_tokens} tokens."
        )
    scale = min(1.0, LARGEST_SIDE / max(height, width))
    if scale < 1:
        size = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
        height, width = size
    data = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).flatten().tolist()
    encoded = base64.b64encode(bytes(data)).decode("ascii")
    first = n_tokens - rows * columns
    return {"kind": "image", "grid": [rows, columns], "first": first, "size": [height, width], "pixels": encoded}


def patch_names(subject: dict[str, Any], n_tokens: int) -> list[str]:
    """Return names of the tokens of an image: patches by row and column from 1."""
    first, columns = subject["first"], subject["grid"][1]
    extra = ["CLS"] if first == 1 else [f"extra {number + 1}" for number in range(first)]
    return extra + [f"{place // columns + 1},{place % columns + 1}" for place in range(n_tokens - first)]


def points_subject(points: Any) -> dict[str, Any]:
    """Return points (n, 2) or (n, 3), moved and scaled into the unit ball."""
    if not isinstance(points, Tensor) or points.dim() != 2 or points.shape[1] not in (2, 3) or not len(points):
        got = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
        raise ValueError(f"{CALLER}: points must be a tensor (n, 3) or (n, 2), one row per token; got {got}.")
    places = points.detach().double().cpu()
    if not places.isfinite().all():
        raise ValueError(f"{CALLER}: points must be finite; got NaN or infinity among them.")
    places = places - (places.amax(0) + places.amin(0)) / 2
    places = F.pad(places / places.norm(dim=-1).max().clamp_min(1e-12), (0, 3 - places.shape[1]))
    return {"kind": "points", "places": [[round(x, 4) for x in place] for place in places.tolist()]}


def whole_characters(text: str) -> str:
    """Return a text with a question mark for each half of a character, which no file in UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _shortened(token: str) -> str:
    token = whole_characters(token)
    return token if len(token) <= LONGEST_TOKEN else token[: LONGEST_TOKEN - 1] + "…"


def _pixels(image: Any) -> Tensor:
    """Return an image as float (3, height, width) from 0 to 1."""
    if not isinstance(image, Tensor):
        try:
            import numpy

            image = torch.from_numpy(numpy.array(image))
        except (ImportError, TypeError, ValueError) as error:
            raise TypeError(
                f"{CALLER}: image must be a tensor (channels, height, width), or a PIL image or array "
                f"(height, width, channels); got {type(image).__name__} ({error})."
            ) from error
        image = image.permute(2, 0, 1) if image.dim() == 3 else image
    image = image[None] if image.dim() == 2 else image
    if image.dim() != 3 or image.shape[0] not in (1, 3, 4) or not image.numel() or image.is_complex():
        raise ValueError(
            f"{CALLER}: image must be (channels, height, width) with 1, 3 or 4 channels, without a batch axis; got "
            f"{tuple(image.shape)}."
        )
    pixels = image.detach().cpu()[:3]
    if pixels.is_floating_point():
        pixels = pixels.float().nan_to_num(0.0, 0.0, 0.0)
        low, high = float(pixels.min()), float(pixels.max())
        if low < 0 or high > 1:  # normalised for a model
            pixels = (pixels - low) / max(high - low, 1e-12)
    else:
        pixels = pixels.float() / (1.0 if image.dtype == torch.bool else 255.0)
    return pixels.expand(3, -1, -1)


def _grid(grid: Any, n_tokens: int, height: int, width: int) -> tuple[int, int]:
    """Return the rows and columns of patches; by default, of the largest grid of square patches that fits."""
    if grid is not None:
        if not isinstance(grid, tuple | list) or len(grid) != 2 or not all(type(x) is int and x > 0 for x in grid):
            raise TypeError(f"{CALLER}: grid must be the rows and columns of patches, such as (14, 14); got {grid!r}.")
        return grid[0], grid[1]
    for patches in range(n_tokens, max(0, n_tokens - 9), -1):  # 8 further tokens at most
        rows = round(math.sqrt(patches * height / width))
        if rows > 0 and patches % rows == 0 and height * (patches // rows) == width * rows:
            return rows, patches // rows
    raise ValueError(
        f"{CALLER}: {n_tokens} tokens of an image of {height}×{width} are not a grid of square patches with up to 8 "
        "further tokens. Pass grid=(rows, columns)."
    )
