"""How the command says no: one sentence on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

import typer


def refuse(reason: str) -> NoReturn:
    """End the command because of something its user can change; `reason` says what, and how."""
    print(f"sinkformers: {reason}", file=sys.stderr)
    raise typer.Exit(code=2)


def need(who: str, libraries: tuple[str, ...], extra: str) -> None:
    """Refuse, with the remedy, where one of the libraries is not installed; `who` needs it."""
    for name in libraries:
        try:
            import_module(name)
        except ModuleNotFoundError:
            refuse(f"{who} need {name}; install it with pip install 'sinkformers[{extra}]'.")
