"""Locks on runs, with which several processes on one machine share an output folder.

A lock is a file lock of the operating system, which releases it when the process ends, even if the process is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sinkformers.lab.artefacts.artefact import METRICS_FILE, ExperimentError

LOCK_FILE = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Try to lock the run in `folder`, without waiting. Yields whether this process holds the lock within the block.

    Check again within the block whether the run is finished: another process may have finished it in the meantime.

    Raises:
        ExperimentError: if the folder cannot be made or written.
    """
    lock = FileLock(folder / LOCK_FILE)
    held = _acquired(lock, folder)
    try:
        yield held
    finally:
        if held:
            # Safe only for a finished run: a process that opened the old file still finds the run finished.
            if (folder / METRICS_FILE).exists():
                with suppress(OSError):
                    (folder / LOCK_FILE).unlink()
            lock.release()


def _acquired(lock: FileLock, folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        return False
    except OSError as error:
        raise ExperimentError(
            f"cannot use {folder}: {error.strerror or error}. Choose another --out, one that can be written."
        ) from None
    return True
