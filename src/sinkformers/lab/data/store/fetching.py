"""Downloads: resumed where they broke off, verified before they get their name, from the first mirror that delivers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.catalogue import DataFile, find_data_set
from sinkformers.lab.data.store.checksum import fault_of, sha256_of
from sinkformers.lab.data.store.folder import AnyPath, is_writable, path_of
from sinkformers.lab.data.store.progress import Progress, reported
from sinkformers.lab.data.store.transfer import UnreachableError, transfer

try:
    import fcntl
except ImportError:  # Windows: a file that is open elsewhere cannot be renamed there
    fcntl = None


def fetch(name: str, folder: AnyPath, *, progress: Progress = reported) -> list[Path]:
    """Bring the data set `name` into the data folder `folder`; returns the files that were downloaded.

    Files that are there and right are left alone, damaged ones are replaced. A set that nobody may download on a user's
    behalf raises an error that says where to get it.
    """
    folder = path_of("fetch", "folder", folder)
    entry = find_data_set(name)
    wanted = [file for file in entry.files if _is_wanted(file, folder)]
    if any(not file.urls for file in wanted):
        raise DataError(f"{name} cannot be fetched for you: {entry.by_hand} of the data folder, {folder}.")
    return [download(file, folder, progress=progress) for file in wanted]


def download(file: DataFile, folder: Path, *, progress: Progress = reported) -> Path:
    """Download one file to its path below `folder`, from the first of its mirrors that has the right bytes.

    Nothing else ever stands under that name: bytes gather in a `.part` beside it, which outlives a download that broke
    off, and the next one goes on from there.
    """
    target = folder / file.path
    if not is_writable(target.parent):
        raise DataError(f"{target.parent} is read-only; make it writable, or choose another folder with --data.")
    failures = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(target.with_name(f"{target.name}.part")) as (part, out):
            for url in file.urls:
                try:
                    _gather(url, file, part, out, progress)
                except UnreachableError as reason:
                    failures.append(f"{url}: {reason}")
                else:
                    os.replace(part, target)
                    return target
            if not part.stat().st_size:
                part.unlink()
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error.strerror or error}); make room, or choose another folder with --data."
        ) from error
    raise DataError(f"{target} could not be downloaded ({'; '.join(failures)}); try again, or put it there by hand.")


def _is_wanted(file: DataFile, folder: Path) -> bool:
    found = file.locate(folder)
    if found is None:
        return bool(file.urls) or not file.optional
    return found == folder / file.path and not file.varies and fault_of(file, found, verify=True) is not None


@contextmanager
def _claimed(part: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """The part file, open for appending. A second process that wants it is refused, since both would append."""
    with part.open("ab") as out:
        try:
            if fcntl:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have finished, and renamed the file, since it was opened.
            ours = part.exists() and os.path.samestat(os.fstat(out.fileno()), part.stat())
        except BlockingIOError:
            ours = False
        if not ours:
            raise DataError(f"{part} is being downloaded by another process; wait for it, then run this again.")
        yield part, out


def _gather(url: str, file: DataFile, part: Path, out: BinaryIO, progress: Progress) -> None:
    """Complete the part file from `url` and check it; where older bytes are to blame, once more without them."""
    resumed = bool(out.seek(0, os.SEEK_END))
    transfer(url, out, file.size, lambda done: progress(file.name, done, file.size))
    if sha256_of(part) == file.sha256:
        return
    out.truncate(0)
    if not resumed:
        raise UnreachableError("wrong checksum")
    _gather(url, file, part, out, progress)
