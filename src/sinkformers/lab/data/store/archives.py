"""Archives from elsewhere, unpacked without trusting them: only plain files and folders, only below one new folder."""

from __future__ import annotations

import lzma
import secrets
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, NamedTuple

from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.folder import AnyPath, path_of

MOST_BYTES = 16 * 2**30
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


class Member(NamedTuple):
    """One entry of an archive; `kind` is "file", "folder", or what it is instead."""

    name: str
    kind: str
    size: int
    open: Callable[[], IO[bytes] | None]


def unpack(archive: AnyPath, into: AnyPath, *, most_bytes: int = MOST_BYTES) -> Path:
    """Unpack a zip or tar archive as the new folder `into`, which appears whole or not at all.

    An archive with a member that leaves its folder, is a link or a device, or with more than `most_bytes` in all, is
    refused before anything is written. Owners, modes and times are not taken over. If all members lie in one folder
    of the same name as `into`, that folder becomes `into`.
    """
    archive, into = path_of("unpack", "archive", archive), path_of("unpack", "into", into)
    if into.exists():
        raise DataError(f"{into} is there already, so {archive} was not unpacked; delete the folder first.")
    temporary = into.with_name(f"{into.name}.{secrets.token_hex(4)}.part")
    try:
        with _opened(archive) as members:
            _check(members, archive, most_bytes)
            temporary.mkdir(parents=True)
            for member in members:
                _write(member, temporary / PurePosixPath(member.name))
        _settle(temporary, into)
    except DAMAGED as error:
        reason = str(error).partition(":\n")[0]  # tarfile adds a line for every compression that it tried
        raise DataError(f"{archive} is damaged ({reason}); delete it and get it again.") from error
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked to {into} ({error.strerror or error}); make room there or write access."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return into


@contextmanager
def _opened(archive: Path) -> Iterator[list[Member]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield [_zip_member(opened, info) for info in opened.infolist()]
    else:
        with tarfile.open(archive) as opened:
            yield [_tar_member(opened, info) for info in opened]


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    mode = info.external_attr >> 16
    if info.is_dir():
        kind = "folder"
    elif stat.S_ISLNK(mode):
        kind = "link"
    # Many zip archives were made where there are no modes, and give none.
    elif stat.S_IFMT(mode) in (0, stat.S_IFREG):
        kind = "file"
    else:
        kind = "device"
    return Member(info.filename, kind, info.file_size, lambda: archive.open(info))


def _tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    if info.isfile():
        kind = "file"
    elif info.isdir():
        kind = "folder"
    else:
        kind = "link" if info.issym() or info.islnk() else "device"
    return Member(info.name, kind, info.size, lambda: archive.extractfile(info))


def _check(members: list[Member], archive: Path, most_bytes: int) -> None:
    for member in members:
        reason = None
        path = PureWindowsPath(member.name)  # knows drives, and both kinds of separators
        if member.kind not in ("file", "folder"):
            reason = f"is a {member.kind}"
        elif path.anchor or ".." in path.parts:
            reason = "leads out of the folder"
        if reason:
            raise DataError(
                f"{archive} is not to be trusted: its member {member.name!r} {reason}; get it again elsewhere."
            )
    total = sum(member.size for member in members)
    if total > most_bytes:
        raise DataError(
            f"{archive} would unpack to {total:,} bytes, over the limit of {most_bytes:,}; check its origin."
        )


def _settle(temporary: Path, into: Path) -> None:
    inner = temporary / into.name
    try:
        (inner if [*temporary.iterdir()] == [inner] and inner.is_dir() else temporary).rename(into)
    except OSError:
        if not into.is_dir():  # else another process was first, and its folder is as good
            raise


def _write(member: Member, target: Path) -> None:
    if member.kind == "folder":
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    content = member.open()
    assert content is not None
    with content, target.open("xb") as out:
        shutil.copyfileobj(content, out)
