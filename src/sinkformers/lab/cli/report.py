"""`sinkformers report`: a summary of the finished runs of some folders, in the terminal and as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkformers.lab.cli.refusal import need, refuse

if TYPE_CHECKING:
    from sinkformers.lab.reporting.summary import Summary

WIDE = 400  # columns


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Folders with runs: an output folder, an artefact, a preset, or one run.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the folder report/ is written; by default, the first DIR."),
    ] = None,
    fill: Annotated[
        Path | None,
        typer.Option("--fill", metavar="FILE", help="A Markdown page whose marked tables are updated."),
    ] = None,
) -> None:
    """Report finished runs beside the paper's numbers.

    Prints tables, and writes a page with figures that opens offline.
    """
    need("reports", ("matplotlib", "jinja2"), "cli")
    from sinkformers.lab.artefacts import catalogue
    from sinkformers.lab.reporting import filling, page, records
    from sinkformers.lab.reporting.summary import summarise

    target = (out or folders[0]) / "report"
    try:
        found = records.find(folders)
        if not found.records:
            refuse(_no_finished_run(folders, len(found.unfinished)))
        summaries = summarise(found, catalogue.find)
        for summary in summaries:
            _print(summary)
        written = page.write(summaries, target)
        if fill is not None:
            fill.write_text(filling.filled(fill.read_text(encoding="utf-8"), summaries), encoding="utf-8")
    except UnicodeDecodeError as error:
        refuse(f"--fill: {fill} is not UTF-8 ({error.reason} at byte {error.start}); name a Markdown page in UTF-8.")
    except OSError as error:
        refuse(f"cannot write {error.filename or target}: {error.strerror or error}; choose another file or folder.")
    typer.echo(f"Written to {written}")


def _no_finished_run(folders: list[Path], unfinished: int) -> str:
    others = {0: "and none is running", 1: "one is unfinished"}.get(unfinished, f"{unfinished} are unfinished")
    return f"{', '.join(map(str, folders))} contains no finished run, {others}; a report needs at least one."


def _print(summary: Summary) -> None:
    from rich.console import Console

    from sinkformers.lab.reporting import tables, words

    # Do not wrap lines in a pipe.
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    about = f": {summary.scale.about}" if summary.scale else ""
    typer.echo(f"{summary.artefact.title}, {summary.preset}{about}")
    printed = {
        f"test {summary.metric.label}": tables.results(summary),
        "all runs": tables.runs(summary),
        "time and attention": tables.costs(summary),
    }
    if summary.artefact.equal_time:
        printed["after equal seconds"] = tables.equal_time(summary)
    for title, table in printed.items():
        if table.rows and len(table.headings) > 1:
            console.print(tables.terminal(table, title))
    for sentence in filter(None, (words.finding(summary), words.trend(summary), *words.notes(summary))):
        typer.echo(sentence)
    typer.echo()
