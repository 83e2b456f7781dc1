"""`sinkformers doctor`: `python -m sinkformers.doctor` as a subcommand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    bench: Annotated[bool, typer.Option("--bench", help="Time the backends beside SDPA and eager SoftMax.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="Examine this device alone, cuda:0 for instance.", metavar="NAME")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write a record that the benchmarks' report reads.", metavar="FILE"),
    ] = None,
) -> None:
    """Show what serves attention on this machine, and compare each backend with float64. Ends with 1 if one is off."""
    from sinkformers.doctor import main

    arguments = ["--bench"] if bench else []
    arguments += [] if device is None else ["--device", device]
    arguments += [] if json is None else ["--json", str(json)]
    raise typer.Exit(code=main(arguments, program="sinkformers doctor"))
