"""How long work tells its caller how far it is, so that this room needs no library for drawing bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, "int | None"], None]
"""Called with what is being worked on, how much of it is done, and how much there is (`None` where nobody knows)."""

_LISTENER: ContextVar[Progress | None] = ContextVar("progress", default=None)


def reported(what: str, done: int, total: int | None) -> None:
    """The `Progress` of a caller who did not give one: whoever listens hears it."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(what, done, total)


@contextmanager
def heard_by(listener: Progress) -> Iterator[None]:
    """Let `listener` hear of all long work within the block."""
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)
