"""Downloads: verified before a file gets its name, from the first mirror that has the right content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.catalogue import find_data_set
from sinkformers.lab.data.store.checksum import find_fault
from sinkformers.lab.data.store.data_set import DataFile
from sinkformers.lab.data.store.folder import AnyPath, is_writable, path_of

TIMEOUT = 30.0  # seconds without a byte


def fetch(name: str, folder: AnyPath, *, progress: bool = False) -> list[Path]:
    """Download the missing and damaged files of the data set `name` into the data folder `folder`, and return them.

    `progress` shows a progress bar for each file. A set that cannot be downloaded automatically raises an error that
    says where to get it.
    """
    folder = path_of("fetch", "folder", folder)
    entry = find_data_set(name)
    needed = [file for file in entry.files if _is_needed(file, folder)]
    if any(not file.urls for file in needed):
        raise DataError(f"{name} cannot be downloaded automatically: {entry.fix}, {folder}.")
    return [download(file, folder, progress=progress) for file in needed]


def download(file: DataFile, folder: Path, *, progress: bool = False) -> Path:
    """Download one file to its path below `folder`.

    The content goes to a file ending in `.partial`, which is renamed once its checksum is verified. A process that is
    killed leaves that file, and the next download removes it.
    """
    import http.client  # these take longer to import than the command line takes to answer
    import ssl
    import urllib.error

    from torch.hub import download_url_to_file

    target = folder / file.path
    if not is_writable(target.parent):
        raise DataError(f"{target.parent} is read-only; make it writable, or choose another folder with --data.")
    failures = []
    for url in file.urls:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _timeout(TIMEOUT):
                download_url_to_file(url, str(target), hash_prefix=file.sha256, progress=progress)
        except urllib.error.HTTPError as error:
            error.close()
            failures.append(f"{url}: HTTP {error.code}")
        except RuntimeError:
            failures.append(f"{url}: wrong checksum")
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError) as error:
            failures.append(f"{url}: {getattr(error, 'reason', error)}")
        except OSError as error:
            reason = error.strerror or error
            raise DataError(
                f"{target} cannot be written ({reason}); free some space, or choose another folder with --data."
            ) from error
        else:
            for left in target.parent.glob(f"{target.name}.*.partial"):
                left.unlink(missing_ok=True)
            return target
    raise DataError(f"{target} could not be downloaded ({'; '.join(failures)}); try again, or put it there by hand.")


def _is_needed(file: DataFile, folder: Path) -> bool:
    found = file.locate(folder)
    if found is None:
        return bool(file.urls) or not file.optional
    return found == folder / file.path and not file.varies and find_fault(file, found, verify=True) is not None


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """Give up on servers that send nothing for `seconds`; torch's function has no argument for it."""
    import socket

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
