"""`sinkformers figure …`: pictures of the operator, one subcommand each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sinkformers.cli.refusal import need, refuse

FORMATS = (".png", ".svg", ".pdf")

app = typer.Typer(help="Draw what the normalisations do.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Draw what the normalisations do."""


Out = Annotated[
    Path,
    typer.Option(
        "--out",
        help=f"The picture to write ({', '.join(FORMATS)}); missing folders are made.",
        metavar="FILE",
    ),
]


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
    need("figures", ("matplotlib",), "cli")
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
