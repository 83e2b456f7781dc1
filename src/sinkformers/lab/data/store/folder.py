"""The folder of the data sets: given by the user, or below the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

from sinkformers.lab.data.error import DataError

VARIABLE = "SINKFORMERS_DATA"
AnyPath = str | os.PathLike[str]


def data_folder(given: AnyPath | None = None) -> Path:
    """Return the folder that contains one folder per data set: `given`, else `$SINKFORMERS_DATA`, else
    `sinkformers/data` in the user's cache.

    A folder that is given must exist; the one in the cache is made by the first download.
    """
    named = given or os.environ.get(VARIABLE)
    if not named:
        return user_cache() / "data"
    folder = path_of("data_folder", "given", named).expanduser()
    origin = "--data" if given else VARIABLE
    if not folder.exists():
        raise DataError(
            f"the data folder {folder} ({origin}) does not exist; make it, or leave out {origin} to use the cache."
        )
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} ({origin}) is a file; name the folder that contains the data sets.")
    return folder


def path_of(caller: str, argument: str, value: AnyPath) -> Path:
    """Return `value`, text or a path object, as a `Path`; anything else is a TypeError that names the argument."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(
            f"{caller}: {argument} must be a path, as str or os.PathLike; got {type(value).__name__}. "
            f'Pass the name of a file or folder, such as "data".'
        )
    return Path(value)


def user_cache() -> Path:
    """Return `sinkformers` below `$XDG_CACHE_HOME`, or below `~/.cache` if that is not an absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "sinkformers"


def is_writable(folder: Path) -> bool:
    """Whether files may be made in `folder`, or in its first existing parent if it does not exist yet.

    A folder without write permission counts as read-only for root too.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)
