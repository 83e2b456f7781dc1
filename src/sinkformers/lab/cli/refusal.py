"""How the command says no: one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

STOPPED = 130  # what a shell gives for an interrupt


def refuse(reason: str, code: int = 2) -> NoReturn:
    """End the command because of something its user can change; `reason` says what, and how."""
    print(f"sinkformers: {reason}", file=sys.stderr)
    raise typer.Exit(code=code)


class Commands(TyperGroup):
    """The command tree. What the system refuses, and no command has a better answer to, is a sentence too."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # nobody reads on
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            if error.filename is None:
                refuse(f"the system refuses: {reason}.")
            what = shortened(str(error.filename))
            refuse(f"cannot use {what}: {reason}; name another file or folder, or change its rights.")


def shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def need(who: str, libraries: tuple[str, ...], extra: str) -> None:
    """Refuse, with the remedy, where one of the libraries is not installed; `who` needs it."""
    for name in libraries:
        try:
            import_module(name)
        except ModuleNotFoundError:
            refuse(f"{who} need {name}; install it with pip install '.[{extra}]' in your clone.")
