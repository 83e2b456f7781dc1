"""`sinkformers figure …`: pictures of the operator, one subcommand each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkformers.cli.refusal import refuse

if TYPE_CHECKING:
    from sinkformers.experiments.figure1 import Normalizations

FORMATS = (".png", ".svg", ".pdf")

app = typer.Typer(help="Draw what the normalisations do.", no_args_is_help=True)

Out = Annotated[
    Path,
    typer.Option(
        "--out",
        help=f"The picture to write ({', '.join(FORMATS)}); missing folders are made.",
        metavar="FILE",
    ),
]


@app.command()
def normalizations(out: Out) -> None:
    """Figure 1 of the paper: K⁰, K¹ (SoftMax) and K^∞ (Sinkhorn) on two clouds of 10 points.

    Prints how much each key receives under the three normalisations.
    """
    _prepare(out)
    from sinkformers.experiments import figure1

    result = figure1.run()
    with _refusing_to_write(out):
        figure1.draw(result, out)
    _print_column_sums(result)
    typer.echo(f"Drawn to {out}")


@app.command()
def attention(out: Out) -> None:
    """One attention matrix under SoftMax, and after 3 and 21 normalisations, with its column sums."""
    _prepare(out)
    from sinkformers.experiments import attention_matrix

    result = attention_matrix.run()
    with _refusing_to_write(out):
        attention_matrix.draw(result, out)
    for n_iters, sums in result.column_sums.items():
        typer.echo(f"n_iters {n_iters:>2}: column sums from {sums.min():.4f} to {sums.max():.4f}")
    typer.echo(f"Drawn to {out}")


def _prepare(out: Path) -> None:
    """Refuse before the work what could not be written after it."""
    if out.is_dir():
        refuse(f"--out must name a file, but {out} is a folder; try {out / 'figure.png'}.")
    if out.suffix.lower() not in FORMATS:
        refuse(f"--out must end in {', '.join(FORMATS)}, which choose the format; got {out}.")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        refuse("figures need matplotlib; install it with pip install 'sinkformers[cli]'.")
    if out.parent.exists() and not out.parent.is_dir():
        refuse(f"cannot write {out}: {out.parent} is not a folder; choose another --out.")
    with _refusing_to_write(out):
        out.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def _refusing_to_write(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        refuse(f"cannot write {out}: {error.strerror or error}; choose another --out.")


def _print_column_sums(result: Normalizations) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="What each key receives (column sums)", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("key", "cluster", "K⁰ = exp(C)", "K¹ SoftMax", "K^∞ Sinkhorn"):
        table.add_column(heading, justify="right", no_wrap=True)
    for key, (cluster, sums) in enumerate(zip(result.cluster.tolist(), result.column_sums.T.tolist(), strict=True)):
        unnormalised, softmax, sinkhorn = sums
        table.add_row(str(key + 1), "AB"[cluster], f"{unnormalised:.2e}", f"{softmax:.6f}", f"{sinkhorn:.6f}")
    Console().print(table)
