"""How long work tells its caller how far it is, so that this room needs no library for drawing bars."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, "int | None"], None]
"""Called with what is being worked on, how much of it is done, and how much there is (`None` where nobody knows)."""


def silent(what: str, done: int, total: int | None) -> None:
    """The `Progress` of a caller who did not ask."""
