"""`sinkformers data …`: which data sets are there, and how to get the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkformers.lab.cli.refusal import refuse

if TYPE_CHECKING:
    from sinkformers.lab.data import Progress

app = typer.Typer(help="See which data sets are there, and fetch them.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="The folder that the data sets lie in; else $SINKFORMERS_DATA, else the user's cache.",
        metavar="DIR",
    ),
]


@app.command()
def status(
    data: Folder = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare checksums too, not only sizes.")] = False,
) -> None:
    """List the data sets: embedded, complete, incomplete, absent or corrupt; with code 1 where one is corrupt."""
    from sinkformers.lab.data import CATALOGUE, DataError, data_folder, status_of

    try:
        folder = data_folder(data)
        rows = [status_of(entry, folder, verify=verify) for entry in CATALOGUE.values()]
    except DataError as error:
        refuse(str(error))
    typer.echo(f"In {folder}\n")
    for name, state, detail in rows:
        typer.echo(f"{name:<{max(map(len, CATALOGUE))}}  {state:<10}  {detail}".rstrip())
    if any(row.state == "corrupt" for row in rows):
        raise typer.Exit(code=1)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A data set, as `sinkformers data status` names it.")],
    data: Folder = None,
) -> None:
    """Download what a data set lacks, verified by checksum; a download that broke off is resumed."""
    from sinkformers.lab.data import DataError, data_folder, find_data_set
    from sinkformers.lab.data import fetch as fetch_files

    try:
        folder, entry = data_folder(data), find_data_set(name)
        with _progress() as progress:
            fetched = fetch_files(name, folder, progress=progress)
    except DataError as error:
        refuse(str(error))
    if not entry.files:
        typer.echo(f"{name} comes with scikit-learn; there is nothing to fetch")
    elif not fetched:
        typer.echo(f"{name} is complete in {folder}")
    else:
        typer.echo(f"Fetched {len(fetched)} files of {name} to {folder}")


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar a file in a terminal, and a line a file elsewhere."""
    if not sys.stdout.isatty():
        yield _print_line
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns) as bars:
        tasks = {}

        def advance(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield advance


def _print_line(what: str, done: int, total: int | None) -> None:
    if done == total:
        typer.echo(f"{what}: {done:,} bytes")
