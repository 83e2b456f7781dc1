"""The command tree: the options of `sinkformers` itself, and one file per subcommand."""

from __future__ import annotations

from typing import Annotated

import typer

from sinkformers.lab.cli import data, doctor, figure, listing, look, predict, report, run
from sinkformers.lab.cli.refusal import Commands

app = typer.Typer(
    name="sinkformers",
    cls=Commands,
    help="Doubly stochastic attention: Sinkhorn's algorithm in place of SoftMax.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich takes as long to import as everything else together
)
app.command("list")(listing.show)
app.command("run")(run.run)
app.command()(report.report)
app.command()(predict.predict)
app.command()(doctor.doctor)
app.command()(look.look)
app.add_typer(figure.app, name="figure")
app.add_typer(data.app, name="data")


def _print_version(requested: bool) -> None:
    if requested:
        from sinkformers import __version__

        typer.echo(f"sinkformers {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
