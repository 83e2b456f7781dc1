"""IMDb's labelled reviews (Maas et al. 2011): 25,000 for training and 25,000 for testing, half of them positive.

They are read from the archive, or from the unpacked folder; nothing is written to disk.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.archives import DAMAGED
from sinkformers.lab.data.store.data_set import DataSet, list_files
from sinkformers.lab.data.store.folder import AnyPath, path_of
from sinkformers.lab.data.texts import Texts, TextSet

CLASSES = ("neg", "pos")
PER_CLASS = 12_500  # reviews, in training and in testing
NAME = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/(\d{1,9})_\d{1,2}\.txt")
LARGEST = 2**20  # bytes; the longest review has 14 kB
CHECKSUMS = """
78f70e57d4c51d6aa40a428b19dd599729296e569e844323f00b3e306ea63bb3 18604360 aclImdb_labeled.tar.xz
"""


class Review(NamedTuple):
    """One file. The fields give the sorting order: by part, negative before positive, by number."""

    part: str
    label: int
    number: int
    text: str


def describe(_folder: Path, places: Sequence[Path]) -> str:
    """Check that an unpacked `aclImdb` is complete, without reading the reviews."""
    if places[0].is_dir():
        _check_counts(places[0], [_place(found) for _, found in _named(places[0])])
    return places[0].name


DATA_SET = DataSet(
    "imdb",
    title="IMDb: 50,000 labelled film reviews",
    licence="research use, with citation (Maas et al. 2011)",
    by_hand="get aclImdb_v1.tar.gz from https://ai.stanford.edu/~amaas/data/sentiment/ and put it into imdb/",
    files=list_files("imdb", CHECKSUMS, alternatives=("imdb/aclImdb_v1.tar.gz", "imdb/aclImdb")),
    describe=describe,
)


def load_imdb(folder: AnyPath) -> TextSet:
    """Load the reviews below the data folder `folder`: from `imdb/aclImdb_labeled.tar.xz`, from Stanford's
    `imdb/aclImdb_v1.tar.gz`, or from the folder `imdb/aclImdb`. Line breaks stay `<br />`, as in the files."""
    folder = path_of("load_imdb", "folder", folder)
    source = DATA_SET.files[0].locate(folder)
    if source is None:
        raise DataError(
            f"imdb: there is neither an archive nor aclImdb in {folder / 'imdb'}; {DATA_SET.fix}, "
            "or name the folder above imdb with --data."
        )
    reviews = sorted(_scanned(source) if source.is_dir() else _unpacked(source))
    _check_counts(source, [(review.part, review.label, review.number) for review in reviews])
    return TextSet(_part(reviews, "train"), _part(reviews, "test"), CLASSES, "imdb")


def _check_counts(source: Path, places: list[tuple[str, int, int]]) -> None:
    for part in ("train", "test"):
        for label, name in enumerate(CLASSES):
            numbers = [place[2] for place in places if place[:2] == (part, label)]
            if len(numbers) != PER_CLASS or len(set(numbers)) != PER_CLASS:
                raise DataError(
                    f"{source} contains {len(numbers):,} reviews in {part}/{name}, {len(set(numbers)):,} of them "
                    f"different, instead of {PER_CLASS:,}; {DATA_SET.fix}."
                )


def _part(reviews: list[Review], part: str) -> Texts:
    import torch

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
        raise DataError(f"{archive} is damaged ({reason}); delete it and {DATA_SET.fix}.") from error
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
    """Yield the files of an unpacked archive whose names are those of reviews."""
    for file in folder.glob("t*/*/*.txt"):
        if found := NAME.fullmatch(file.as_posix()):
            yield file, found


def _place(found: re.Match[str]) -> tuple[str, int, int]:
    """Return part, label and number from the name of a file."""
    return found[1], CLASSES.index(found[2]), int(found[3])


def _review(found: re.Match[str], content: bytes, where: str) -> Review:
    if len(content) > LARGEST:
        raise DataError(f"{where} is longer than {LARGEST:,} bytes, so it is not a review; {DATA_SET.fix}.")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8; {DATA_SET.fix}.") from error
    return Review(*_place(found), text)
