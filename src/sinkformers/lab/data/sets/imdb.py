"""IMDb's labelled reviews (Maas et al. 2011): 25,000 to train on and 25,000 to test with, half of them positive.

They are read from the archive, or from the folder that it unpacks to; nothing is written to disk.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.archives import DAMAGED
from sinkformers.lab.data.store.catalogue import find_data_set
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.texts import Texts, TextSet

CLASSES = ("neg", "pos")
EACH = 12_500  # reviews of a class, in training and in testing
NAME = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/(\d{1,9})_\d{1,2}\.txt")
LARGEST = 2**20  # the longest review has 14 kB
BY_HAND = f"{find_data_set('imdb').by_hand} of the data folder"


class Review(NamedTuple):
    """One file. Sorted, a part's negative reviews stand before its positive ones, each by number."""

    part: str
    label: int
    number: int
    text: str


def load_imdb(folder: AnyPath) -> TextSet:
    """The reviews below the data folder `folder`: in `imdb/aclImdb_labeled.tar.xz`, in Stanford's
    `imdb/aclImdb_v1.tar.gz`, or in the folder `imdb/aclImdb`. Line breaks stay what they are there, `<br />`."""
    folder = path_of("load_imdb", "folder", folder)
    source = find_data_set("imdb").files[0].locate(folder)
    if source is None:
        raise DataError(
            f"imdb: there is neither an archive nor aclImdb in {folder / 'imdb'}; {BY_HAND}, or name "
            "the folder above imdb with --data."
        )
    reviews = sorted(_scanned(source) if source.is_dir() else _unpacked(source))
    _check_counts(source, [(review.part, review.label, review.number) for review in reviews])
    return TextSet(_part(reviews, "train"), _part(reviews, "test"), CLASSES, "imdb")


def check_folder(folder: Path) -> None:
    """Refuse an unpacked `aclImdb` that lacks reviews; none of them is read."""
    _check_counts(folder, [_place(found) for _, found in _named(folder)])


def _check_counts(source: Path, places: list[tuple[str, int, int]]) -> None:
    for part in ("train", "test"):
        for label, name in enumerate(CLASSES):
            numbers = [place[2] for place in places if place[:2] == (part, label)]
            if len(numbers) != EACH or len(set(numbers)) != EACH:
                raise DataError(
                    f"{source} holds {len(numbers):,} reviews in {part}/{name}, {len(set(numbers)):,} of them "
                    f"different, where IMDb has {EACH:,}; {BY_HAND}."
                )


def _part(reviews: list[Review], part: str) -> Texts:
    mine = [review for review in reviews if review.part == part]
    return Texts([review.text for review in mine], torch.tensor([review.label for review in mine]))


def _unpacked(archive: Path) -> Iterator[Review]:
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                found = NAME.fullmatch(member.name)
                if found and member.isfile():
                    content = opened.extractfile(member)
                    assert content is not None
                    yield _review(found, content.read(LARGEST + 1), f"{member.name} in {archive}")
    except DAMAGED as error:
        reason = str(error).partition(":")[0]  # tarfile's goes on for several lines
        raise DataError(f"{archive} is damaged ({reason}); delete it and {BY_HAND}.") from error
    except OSError as error:
        raise DataError(f"{archive} cannot be read ({error.strerror or error}); make it readable.") from error


def _scanned(folder: Path) -> Iterator[Review]:
    try:
        for file, found in _named(folder):
            with file.open("rb") as content:
                yield _review(found, content.read(LARGEST + 1), str(file))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror or error}); make it readable.") from error


def _named(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """The files of an unpacked archive that are named as reviews are."""
    for file in folder.glob("t*/*/*.txt"):
        if found := NAME.fullmatch(file.as_posix()):
            yield file, found


def _place(found: re.Match[str]) -> tuple[str, int, int]:
    """Part, label and number, by the name of a file."""
    return found[1], CLASSES.index(found[2]), int(found[3])


def _review(found: re.Match[str], content: bytes, where: str) -> Review:
    if len(content) > LARGEST:
        raise DataError(f"{where} is longer than {LARGEST:,} bytes, which no review is; {BY_HAND}.")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8; {BY_HAND}.") from error
    return Review(*_place(found), text)
