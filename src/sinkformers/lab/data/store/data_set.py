"""The description of a data set: its files, their checksums, where to download them, or how to get them by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from sinkformers.lab.data.store.folder import AnyPath, path_of


@dataclass(frozen=True)
class DataFile:
    """One file of a data set. `path` and `alternatives` are relative to the data folder."""

    path: str
    size: int
    sha256: str
    urls: tuple[str, ...] = ()  # mirrors; none if the file cannot be downloaded automatically
    optional: bool = False
    varies: bool = False  # other versions are accepted; the checksum is that of one of them
    alternatives: tuple[str, ...] = ()  # files or folders that are accepted in its place

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def locate(self, folder: AnyPath) -> Path | None:
        """Return the path of the file, or of its first existing alternative, below the data folder `folder`."""
        folder = path_of("DataFile.locate", "folder", folder)
        return next((folder / path for path in (self.path, *self.alternatives) if (folder / path).exists()), None)


@dataclass(frozen=True)
class DataSet:
    """One entry of the catalogue. A set without files is part of the installed library `library`.

    `by_hand` is an instruction without a full stop; " of the data folder" is appended to it. `describe` is given the
    data folder and the located files, and returns a few words about their contents; it raises `DataError` if they are
    not usable.
    """

    name: str
    title: str
    licence: str
    by_hand: str = ""
    files: tuple[DataFile, ...] = ()
    library: str = ""
    describe: Callable[[Path, Sequence[Path]], str] | None = None

    @property
    def fix(self) -> str:
        """How to get the files, as the end of an error message."""
        return f"{self.by_hand} of the data folder"

    def file(self, name: str) -> DataFile:
        return next(file for file in self.files if file.name == name)


def list_files(
    folder: str,
    checksums: str,
    *,
    urls: Sequence[str] = (),
    alternatives: Sequence[str] = (),
    optional: Sequence[str] = (),
    varies: Sequence[str] = (),
) -> tuple[DataFile, ...]:
    """Return the files below `folder` that `checksums` lists, one per line: SHA-256, size in bytes, path.

    In `urls` and `alternatives`, {name} stands for the name of a file and {stem} for the name without its suffix.
    `optional` and `varies` are patterns of names.
    """
    files = []
    for line in filter(None, checksums.splitlines()):
        sha256, size, path = line.split()
        name, stem = PurePosixPath(path).name, PurePosixPath(path).stem
        file = DataFile(
            path=f"{folder}/{path}",
            size=int(size),
            sha256=sha256,
            urls=tuple(url.format(name=name) for url in urls),
            optional=any(fnmatch(name, pattern) for pattern in optional),
            varies=any(fnmatch(name, pattern) for pattern in varies),
            alternatives=tuple(place.format(name=name, stem=stem) for place in alternatives),
        )
        files.append(file)
    return tuple(files)
