"""How the command refuses: one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from sinkformers.lab.error import LabError

STOPPED = 130  # the exit code of shells for an interrupt


def refuse(reason: str, code: int = 2) -> NoReturn:
    """End the command with an error that its user can fix; `reason` says what is wrong, and how to fix it."""
    print(f"sinkformers: {reason}", file=sys.stderr)
    raise typer.Exit(code=code)


class Commands(TyperGroup):
    """The command tree. Errors that the user can fix, and those of the operating system, become one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LabError as error:
            refuse(str(error))
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            if error.filename is None:
                refuse(f"the operating system refuses: {reason}.")
            what = shortened(str(error.filename))
            refuse(f"cannot use {what}: {reason}; name another file or folder, or change its permissions.")


def shortened(text: str, most: int = 200) -> str:
    """Return `text` with its middle replaced by … if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def need(who: str, libraries: tuple[str, ...], extra: str) -> None:
    """Refuse if one of the libraries that `who` need is not installed. None of them is imported."""
    for name in libraries:
        if find_spec(name) is None:
            refuse(f"{who} need {name}; install it with pip install '.[{extra}]' in your clone.")
