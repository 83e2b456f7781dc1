"""Progress of long work, reported to the caller by a function, so that no library for progress bars is needed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, "int | None"], None]
"""A function of the name of the work, how much of it is done, and how much there is (`None` if unknown)."""

_LISTENER: ContextVar[Progress | None] = ContextVar("progress", default=None)


def report_progress(what: str, done: int, total: int | None) -> None:
    """Call the listener of the enclosing `heard_by` block; the default `Progress` of every function that takes one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(what, done, total)


@contextmanager
def heard_by(listener: Progress) -> Iterator[None]:
    """Report the progress of all long work within the block to `listener`."""
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)
