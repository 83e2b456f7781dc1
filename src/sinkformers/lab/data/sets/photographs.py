"""The photographs of Dogs vs. Cats: `cat.0.jpg`, `dog.0.jpg`, … in `train.zip`, or in the unpacked folder."""

from __future__ import annotations

import lzma
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sinkformers.lab.data.error import DataError

CLASSES = ("cat", "dog")
BY_HAND = (
    "get train.zip from https://www.kaggle.com/c/dogs-vs-cats/data, which asks for a login, and put it into "
    "dogs-vs-cats/"
)
FIX = f"{BY_HAND} of the data folder"
NAME = re.compile(r"(?:.*/)?(cat|dog)\.(\d{1,9})\.jpg")
LARGEST_FILE = 64 * 2**20  # the largest of Kaggle's has less than 1 MB


class Photograph(NamedTuple):
    """One file. The fields give the sorting order: cat.0, dog.0, cat.1, …, so that any slice of a set is balanced."""

    number: int
    label: int
    place: str  # name in the archive, or path
    identity: str  # changes with the content

    @property
    def name(self) -> str:
        return f"{CLASSES[self.label]}.{self.number}.jpg"


@contextmanager
def open_photographs(folder: Path) -> Iterator[tuple[list[Photograph], Callable[[Photograph], bytes]]]:
    """Give all photographs below the data folder `folder`, sorted, and a function that reads one of them."""
    archive, unpacked = folder / "dogs-vs-cats" / "train.zip", folder / "dogs-vs-cats" / "train"
    if archive.is_file():
        with _open(archive) as opened:
            yield _checked(_listed(opened), archive), lambda photograph: _read_member(opened, photograph)
    elif unpacked.is_dir():
        yield _checked(_scanned(unpacked), unpacked), _read_file
    else:
        raise DataError(f"dogs-vs-cats: there is neither {archive} nor {unpacked}; {FIX}.")


def _open(archive: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{archive} is not a readable zip archive ({error}); delete it and {FIX}.") from error


def _listed(archive: zipfile.ZipFile) -> Iterator[Photograph]:
    for member in archive.infolist():
        if found := NAME.fullmatch(member.filename):
            yield _photograph(found, member.filename, f"{member.CRC:08x} {member.file_size}")


def _scanned(folder: Path) -> Iterator[Photograph]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if found := NAME.fullmatch(entry.name):
                yield _photograph(found, entry.path, f"{entry.stat().st_mtime_ns} {entry.stat().st_size}")


def _photograph(found: re.Match[str], place: str, identity: str) -> Photograph:
    return Photograph(int(found[2]), CLASSES.index(found[1]), place, identity)


def _checked(photographs: Iterator[Photograph], source: Path) -> list[Photograph]:
    listed = sorted(photographs)
    counts = [sum(photograph.label == label for photograph in listed) for label in range(len(CLASSES))]
    if min(counts) < 2:
        raise DataError(
            f"{source} contains {counts[0]} files named cat.N.jpg and {counts[1]} named dog.N.jpg, "
            f"and at least two of each are needed; {FIX}."
        )
    name, times = Counter(photograph.name for photograph in listed).most_common(1)[0]
    if times > 1:
        raise DataError(
            f"{source} contains {name} {times} times, so train and test parts could overlap; keep one of them."
        )
    return listed


def _read_member(archive: zipfile.ZipFile, photograph: Photograph) -> bytes:
    where = f"{photograph.place} in {archive.filename}"
    if archive.getinfo(photograph.place).file_size > LARGEST_FILE:
        raise DataError(f"{where} is larger than {LARGEST_FILE // 2**20} MB, so it is not a photograph; {FIX}.")
    try:
        return archive.read(photograph.place)
    # RuntimeError: it is encrypted, or compressed by an unknown method.
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError) as error:
        raise DataError(f"{where} cannot be read ({error}); delete the archive and {FIX}.") from error


def _read_file(photograph: Photograph) -> bytes:
    try:
        return Path(photograph.place).read_bytes()
    except OSError as error:
        raise DataError(f"{photograph.place} cannot be read ({error.strerror or error}); make it readable.") from error
