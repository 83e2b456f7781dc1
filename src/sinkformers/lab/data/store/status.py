"""The status of data sets on disk: complete, incomplete, absent, corrupt, or embedded in a library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from sinkformers.lab.data.error import DataError, missing_library
from sinkformers.lab.data.store.checksum import find_fault
from sinkformers.lab.data.store.data_set import DataFile, DataSet
from sinkformers.lab.data.store.folder import AnyPath, path_of

MOST_NAMES = 3


class Status(NamedTuple):
    """The state of one data set; `detail` says what is missing or wrong, or what was found."""

    name: str
    state: Literal["embedded", "complete", "incomplete", "absent", "corrupt"]
    detail: str


def status_of(entry: DataSet, folder: AnyPath, *, verify: bool = False) -> Status:
    """Look for the files of `entry` below the data folder. Sizes are compared, and checksums too if `verify`.

    Alternatives, and files that may vary, are accepted as they are.
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
        return Status(entry.name, "corrupt", _shortened(damaged))
    if missing:
        return Status(entry.name, "incomplete", f"missing: {_shortened(missing)}")
    try:
        contents = _contents(entry, folder, sorted(set(found.values())))
    except DataError as error:
        return Status(entry.name, "corrupt", str(error))
    own = {place.name: None for file, place in found.items() if faults[file] or place != folder / file.path}
    if own:
        return Status(entry.name, "complete", f"{contents}; your own version of {_shortened([*own])}")
    return Status(entry.name, "complete", f"{contents}; checksums right" if verify else contents)


def _embedded(entry: DataSet) -> Status:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(entry.library)
    except PackageNotFoundError:
        return Status(entry.name, "embedded", str(missing_library(entry.library, f"the {entry.name} set")))
    return Status(entry.name, "embedded", f"in {entry.library}")


def _fault(file: DataFile, place: Path, folder: Path, *, verify: bool) -> str | None:
    return find_fault(file, place, verify=verify) if place == folder / file.path else None


def _contents(entry: DataSet, folder: Path, places: Sequence[Path]) -> str:
    if entry.describe is not None:
        return entry.describe(folder, places)
    return f"{len(places)} files" if len(places) > 1 else places[0].name


def _shortened(items: Sequence[str]) -> str:
    """Return the first few of `items`, and how many more there are."""
    rest = len(items) - MOST_NAMES
    return ", ".join(items[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
