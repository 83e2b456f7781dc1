"""Archives, unpacked without trusting them: nothing is written outside one new folder."""

from __future__ import annotations

import lzma
import secrets
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.folder import AnyPath, path_of

MOST_BYTES = 16 * 2**30
# RuntimeError: a zip archive is encrypted, or compressed by an unknown method.
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


def unpack(archive: AnyPath, into: AnyPath, *, most_bytes: int = MOST_BYTES) -> Path:
    """Unpack a zip or tar archive as the new folder `into`, which appears when it is complete.

    Names that lead out of the folder are confined to it by `zipfile`, and refused by `tarfile.data_filter`. Links and
    devices of a tar archive are refused; zip archives only give plain files. An archive of more than `most_bytes` in
    total is refused. If all members lie in one folder of the same name as `into`, that folder becomes `into`.
    """
    archive, into = path_of("unpack", "archive", archive), path_of("unpack", "into", into)
    if into.exists():
        raise DataError(f"{into} exists already, so {archive} was not unpacked; delete the folder first.")
    temporary = into.with_name(f"{into.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.mkdir(parents=True)
        _extract(archive, temporary, most_bytes)
        _rename(temporary, into)
    except tarfile.FilterError as error:
        raise DataError(f"{archive} is not safe to unpack ({error}); get it from another source.") from error
    except (*DAMAGED, ValueError) as error:
        reason = str(error).partition(":\n")[0]  # tarfile adds a line for every compression that it tried
        raise DataError(f"{archive} is damaged ({reason}); delete it and get it again.") from error
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked to {into} ({error.strerror or error}); free some space there, or make it "
            "writable."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return into


def _extract(archive: Path, folder: Path, most_bytes: int) -> None:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            _check_size(archive, (member.file_size for member in opened.infolist()), most_bytes)
            opened.extractall(folder)
    else:
        with tarfile.open(archive) as opened:
            _check_size(archive, (member.size for member in opened), most_bytes)
            opened.extractall(folder, filter=_plain)


def _check_size(archive: Path, sizes: Iterable[int], most_bytes: int) -> None:
    total = sum(sizes)
    if total > most_bytes:
        raise DataError(
            f"{archive} would unpack to {total:,} bytes, over the limit of {most_bytes:,}; check its origin."
        )


def _plain(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Apply the standard filter, and refuse links too: no data set needs them."""
    if not (member.isfile() or member.isdir()):
        raise tarfile.SpecialFileError(member)
    return tarfile.data_filter(member, folder)


def _rename(temporary: Path, into: Path) -> None:
    inner = temporary / into.name
    try:
        (inner if [*temporary.iterdir()] == [inner] and inner.is_dir() else temporary).rename(into)
    except OSError:
        if not into.is_dir():  # else another process has unpacked the same archive
            raise
