"""Who trains a cell: claims in a folder that any number of processes, on any number of machines, may share.

The claims of a cell are numbered files, made so that only one process can make a given number; the highest one holds.
A holder renews the time of its file. A claim has fallen when its process is gone, if it was made on this machine, or
else when it was not renewed for `LEASE` seconds; whoever makes the next number then holds the cell. A holder that was
only asleep finds the higher number, or the cell finished, and gives up. Times are compared with that of a file written
just now in the same folder, so the clocks of the machines need not agree.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType

import psutil

from sinkformers.lab.artefacts.artefact import METRICS, ExperimentError

LEASE = 600.0
BEAT = 30.0


class Claim:
    """A held claim. As a context it is renewed in the background, and let go at the end."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._over = threading.Event()
        self._lost = False

    def __enter__(self) -> Claim:
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self._over.set()
        self._thread.join()
        self.file.unlink(missing_ok=True)

    def check(self) -> None:
        """Refuse to go on where another process has taken over."""
        folder = self.file.parent
        if self._lost or (folder / METRICS).exists() or _highest(folder) != _number(self.file):
            raise ExperimentError(
                f"{folder} was taken over by another process, because this one was not heard of for "
                f"{LEASE:.0f} s. It goes on there; nothing is lost."
            )

    def _renew(self) -> None:
        while not self._over.wait(BEAT):
            try:
                os.utime(self.file)
            except OSError:
                self._lost = True
                return


def claim(folder: Path, *, lease: float = LEASE) -> Claim | None:
    """The claim of a cell, or None where another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = _highest(folder)
        if number and not _fallen(folder / f"claim-{number}", lease):
            return None
        return _make(folder / f"claim-{number + 1}")
    except OSError as error:
        raise ExperimentError(
            f"cannot use {folder}: {error.strerror or error}. Choose another --out, one that can be written."
        ) from None


def _make(file: Path) -> Claim | None:
    """The claim of this number, whole from the first moment; None if another process was faster."""
    draft = file.with_name(f"draft-{uuid.uuid4().hex}")
    holder = {"machine": _machine(), "pid": os.getpid(), "born": psutil.Process().create_time()}
    draft.write_text(json.dumps(holder), encoding="utf-8")
    try:
        os.link(draft, file)
    except FileExistsError:
        return None
    except OSError:  # a file system without links
        try:
            with file.open("x", encoding="utf-8") as claimed:
                claimed.write(json.dumps(holder))
        except FileExistsError:
            return None
    finally:
        draft.unlink(missing_ok=True)
    return Claim(file)


def _fallen(file: Path, lease: float) -> bool:
    try:
        holder = json.loads(file.read_text(encoding="utf-8"))
        if holder["machine"] == _machine():
            return not _alive(holder["pid"], holder["born"])
    except FileNotFoundError:
        return True  # let go in this moment
    except (ValueError, KeyError, TypeError):
        pass  # not whole yet, or no longer: only its age tells
    try:
        return _now(file.parent) - file.stat().st_mtime > lease
    except FileNotFoundError:
        return True


def _alive(pid: int, born: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - born) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _machine() -> str:
    """This machine, or this container: where a process id means what it says."""
    parts = [socket.gethostname()]
    for source in (Path("/etc/machine-id"), Path("/proc/self/ns/pid")):
        try:
            parts.append(os.readlink(source) if source.is_symlink() else source.read_text(encoding="utf-8").strip())
        except OSError:
            parts.append("")
    return "/".join(parts)


def _now(folder: Path) -> float:
    """The time as the file system tells it."""
    probe = folder / f"draft-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        probe.unlink(missing_ok=True)


def _number(file: Path) -> int:
    return int(file.name.removeprefix("claim-"))


def _highest(folder: Path) -> int:
    numbers = [file.name.removeprefix("claim-") for file in folder.glob("claim-*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)
