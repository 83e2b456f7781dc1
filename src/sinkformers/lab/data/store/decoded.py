"""Decoded pixels kept on disk: large sets are decoded once, and read back as a memory map.

A file holds nothing but pixels, so its size says whether it is whole, and its name says what it was made from. It may
be deleted at any time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.folder import is_writable


def find_decoded(places: Sequence[Path], name: str, shape: Sequence[int]) -> Tensor | None:
    """The uint8 tensor `name` in the first of `places` that has it whole; `None` where it has to be decoded."""
    n_bytes = torch.Size(shape).numel()
    for file in (place / name for place in places):
        if file.is_file() and file.stat().st_size == n_bytes:
            # Private: what a caller writes into the tensor stays in memory.
            return torch.from_file(str(file), shared=False, size=n_bytes, dtype=torch.uint8).view(shape)
    return None


def keep_decoded(places: Sequence[Path], name: str, chunks: Iterable[bytes]) -> None:
    """Write `chunks` to the file `name` in the first writable one of `places`; it appears whole or not at all."""
    place = next((place for place in places if is_writable(place)), None)
    if place is None:
        raise DataError(
            f"decoded images can be kept in none of {', '.join(map(str, places))}; make one of them writable."
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
        _write(place, name, chunks)
    except OSError as error:
        raise DataError(
            f"decoded images cannot be kept in {place} ({error.strerror or error}); make room there or write access."
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
