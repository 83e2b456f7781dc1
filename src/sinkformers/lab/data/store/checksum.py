"""Comparison of a file with its expected size and checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.data_set import DataFile

CHUNK = 2**20


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); make it readable.") from error
    return digest.hexdigest()


def find_fault(expected: DataFile, found: Path, *, verify: bool) -> str | None:
    """Say in a few words how `found` differs from `expected`, or return None. Its content is read only if `verify`."""
    size = found.stat().st_size
    if size != expected.size:
        return f"{expected.name} has {size:,} bytes instead of {expected.size:,}"
    if verify and sha256_of(found) != expected.sha256:
        return f"{expected.name} has the wrong checksum"
    return None
