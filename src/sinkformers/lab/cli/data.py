"""`sinkformers data …`: the status of the data sets, and their download."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Show the status of the data sets, and download them.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="The folder of the data sets; else $SINKFORMERS_DATA, else the user's cache.",
        metavar="DIR",
    ),
]


@app.command()
def status(
    data: Folder = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare checksums too, not only sizes.")] = False,
) -> None:
    """List the data sets: embedded, complete, incomplete, absent or corrupt. The exit code is 1 if one is corrupt."""
    from sinkformers.lab.data import CATALOGUE, data_folder, status_of

    folder = data_folder(data)
    rows = [status_of(entry, folder, verify=verify) for entry in CATALOGUE.values()]
    typer.echo(f"In {folder}\n")
    for name, state, detail in rows:
        typer.echo(f"{name:<{max(map(len, CATALOGUE))}}  {state:<10}  {detail}".rstrip())
    if any(row.state == "corrupt" for row in rows):
        raise typer.Exit(code=1)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The name of a data set; `sinkformers data status` shows all.")],
    data: Folder = None,
) -> None:
    """Download the missing and damaged files of a data set, and verify their checksums."""
    from sinkformers.lab.data import data_folder, find_data_set
    from sinkformers.lab.data import fetch as fetch_files

    folder, entry = data_folder(data), find_data_set(name)
    fetched = fetch_files(name, folder, progress=sys.stderr.isatty())
    for file in fetched:
        typer.echo(f"{file.name}: {file.stat().st_size:,} bytes")
    if not entry.files:
        typer.echo(f"{name} comes with {entry.library}; there is nothing to fetch")
    elif not fetched:
        typer.echo(f"{name} is complete in {folder}")
    else:
        typer.echo(f"Fetched {len(fetched)} files of {name} to {folder}")
