"""How the command says no: one sentence on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer


def refuse(reason: str) -> NoReturn:
    """End the command because of something its user can change; `reason` says what, and how."""
    print(f"sinkformers: {reason}", file=sys.stderr)
    raise typer.Exit(code=2)
