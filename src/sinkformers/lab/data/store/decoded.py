"""A cache of decoded pixels: large image sets are decoded once, then mapped into memory.

A cache file contains pixels only: its size shows whether it is complete, and its name what it was made from. It may be
deleted at any time.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.folder import is_writable

if TYPE_CHECKING:
    from torch import Tensor


def find_decoded(places: Sequence[Path], name: str, shape: Sequence[int]) -> Tensor | None:
    """Map the uint8 tensor `name` from the first of `places` that contains all of it; `None` if none does."""
    import torch

    n_bytes = math.prod(shape)
    for file in (place / name for place in places):
        if file.is_file() and file.stat().st_size == n_bytes:
            # Private: what a caller writes into the tensor stays in memory.
            return torch.from_file(str(file), shared=False, size=n_bytes, dtype=torch.uint8).view(shape)
    return None


def keep_decoded(places: Sequence[Path], name: str, chunks: Iterable[bytes]) -> None:
    """Write `chunks` to the file `name` in the first writable folder of `places`; the file appears when complete."""
    place = next((place for place in places if is_writable(place)), None)
    if place is None:
        raise DataError(
            f"decoded images can be written to none of {', '.join(map(str, places))}; make one of them writable."
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
        _write(place, name, chunks)
    except OSError as error:
        raise DataError(
            f"decoded images cannot be written to {place} ({error.strerror or error}); free some space there, or make "
            "it writable."
        ) from error


def _write(place: Path, name: str, chunks: Iterable[bytes]) -> None:
    temporary = place / f"{name}.{secrets.token_hex(4)}.part"
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
