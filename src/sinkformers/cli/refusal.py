"""How the command says no: one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

import typer

STOPPED = 130  # what a shell gives for an interrupt


def refuse(reason: str, code: int = 2) -> NoReturn:
    """End the command because of something its user can change; `reason` says what, and how."""
    print(f"sinkformers: {reason}", file=sys.stderr)
    raise typer.Exit(code=code)


def need(who: str, libraries: tuple[str, ...], extra: str) -> None:
    """Refuse, with the remedy, where one of the libraries is not installed; `who` needs it."""
    for name in libraries:
        try:
            import_module(name)
        except ModuleNotFoundError:
            refuse(f"{who} need {name}; install it with pip install '.[{extra}]' in your clone.")
