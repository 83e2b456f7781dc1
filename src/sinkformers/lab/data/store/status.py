"""What is on disk: which data sets are complete, which lack files, and which are damaged."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.sets.photographs import CLASSES, open_photographs
from sinkformers.lab.data.store.catalogue import DataFile, DataSet
from sinkformers.lab.data.store.checksum import fault_of
from sinkformers.lab.data.store.folder import AnyPath, path_of

MOST_NAMES = 3


class Status(NamedTuple):
    """The state of one data set; `detail` says what is missing or wrong, or what was found."""

    name: str
    state: Literal["embedded", "complete", "incomplete", "absent", "corrupt"]
    detail: str


def status_of(entry: DataSet, folder: AnyPath, *, verify: bool = False) -> Status:
    """Look for the files of `entry` below the data folder: at their sizes, and to `verify` at their checksums too.

    What lies in another place than the catalogue's is taken as it is, and so are files that differ between users.
    """
    folder = path_of("status_of", "folder", folder)
    if not entry.files:
        return _embedded(entry)
    found = {file: place for file in entry.files if (place := file.locate(folder))}
    missing = [file.name for file in entry.files if not file.optional and file not in found]
    if len(missing) == sum(not file.optional for file in entry.files):
        fetchable = all(file.urls for file in entry.files if not file.optional)
        return Status(entry.name, "absent", f"sinkformers data fetch {entry.name}" if fetchable else entry.by_hand)
    faults = {file: _fault(file, place, folder, verify=verify) for file, place in found.items()}
    damaged = [fault for file, fault in faults.items() if fault and not file.varies]
    if damaged:
        return Status(entry.name, "corrupt", _some(damaged))
    if missing:
        return Status(entry.name, "incomplete", f"missing: {_some(missing)}")
    try:
        contents = _contents(entry, folder, found)
    except DataError as error:
        return Status(entry.name, "corrupt", str(error))
    own = {place.name: None for file, place in found.items() if faults[file] or place != folder / file.path}
    if own:
        return Status(entry.name, "complete", f"{contents}; your own version of {_some([*own])}")
    return Status(entry.name, "complete", f"{contents}; checksums right" if verify else contents)


def _embedded(entry: DataSet) -> Status:
    detail = "in scikit-learn"
    if find_spec("sklearn") is None:
        detail = str(missing_library("scikit-learn", f"the {entry.name} set"))
    return Status(entry.name, "embedded", detail)


def _fault(file: DataFile, place: Path, folder: Path, *, verify: bool) -> str | None:
    return fault_of(file, place, verify=verify) if place == folder / file.path else None


def _contents(entry: DataSet, folder: Path, found: dict[DataFile, Path]) -> str:
    if entry.name == "dogs-vs-cats":
        with open_photographs(folder) as (photographs, _):
            counts = [sum(photograph.label == label for photograph in photographs) for label in range(len(CLASSES))]
        return " and ".join(f"{count:,} {name}s" for count, name in zip(counts, CLASSES, strict=True))
    places = set(found.values())
    if entry.name == "imdb":
        for place in filter(Path.is_dir, places):
            from sinkformers.lab.data.sets.imdb import check_folder  # with torch, which nothing else here needs

            check_folder(place)
    return f"{len(places)} files" if len(places) > 1 else places.pop().name


def _some(items: Sequence[str]) -> str:
    """The first few of `items`, and how many more there are."""
    rest = len(items) - MOST_NAMES
    return ", ".join(items[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
