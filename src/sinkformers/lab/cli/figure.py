"""`sinkformers figure …`: pictures of the operator and of its flows, one subcommand each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sinkformers.lab.cli.refusal import need, refuse

FORMATS = (".png", ".svg", ".pdf")
ANIMATED = (".gif", ".webp")

app = typer.Typer(help="Draw what the normalisations do.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Draw what the normalisations do."""


Out = Annotated[
    Path,
    typer.Option(
        "--out",
        help=f"The picture to write ({', '.join(FORMATS)}); missing folders are created.",
        metavar="FILE",
    ),
]


@app.command()
def attention(out: Out) -> None:
    """Draw one matrix after 1, 3 and 21 normalisations."""
    _prepare(out)
    from sinkformers.lab.artefacts import attention_matrix

    result = attention_matrix.run()
    with _refusing_to_write(out):
        attention_matrix.draw(result, out)
    for n_iters, sums in result.column_sums.items():
        typer.echo(f"n_iters {n_iters:>2}: column sums from {sums.min():.4f} to {sums.max():.4f}")
    typer.echo(f"Drawn to {out}")


@app.command()
def flow(
    out: Annotated[
        Path,
        typer.Option(
            "--out", help=f"The picture to write; animated if it ends in {' or '.join(ANIMATED)}.", metavar="FILE"
        ),
    ],
) -> None:
    """Draw particles in the plane under SoftMax and Sinkhorn."""
    _prepare(out, FORMATS + ANIMATED)
    if out.suffix.lower() in ANIMATED:
        need("animations", ("PIL",), "experiments")
    from sinkformers.lab.theory import cloud

    result = cloud.run()
    with _refusing_to_write(out):
        cloud.draw(result, out)
    for (sign, arm), way in result.ways.items():
        before, after = (way[k].covariance().trace() / 2 for k in (0, -1))
        typer.echo(f"{arm}, W_V = {sign}: variance {before:.4f} at t = 0, {after:.4f} at t = {way.times[-1]:g}")
    typer.echo(f"Drawn to {out}")


@app.command()
def density(out: Out) -> None:
    """Draw densities of particles against heat equations."""
    _prepare(out)
    from sinkformers.lab.reporting.panels import save
    from sinkformers.lab.theory import equations, pictures

    result = equations.densities(n=201, eps=0.01, times=(0.0, 0.05, 0.15))
    with _refusing_to_write(out):
        save(pictures.draw_densities(result), out)
    for arm in result.particles:
        for equation in result.equations:
            typer.echo(f"{arm}: ∫|ρ − ρ'| against {equation} at the end: {result.distance(arm, equation, -1):.4f}")
    typer.echo(f"Drawn to {out}")


@app.command()
def energy(out: Out) -> None:
    """Draw energies along the flows of SoftMax and Sinkhorn."""
    _prepare(out)
    from sinkformers.lab.reporting.panels import save
    from sinkformers.lab.theory import pictures

    result = pictures.energies()
    with _refusing_to_write(out):
        save(pictures.draw_energies(result), out)
    for name, ways in (("T", result.raw), ("T̄", result.recentred)):
        for arm, way in ways.items():
            typer.echo(f"{arm}, {name}: energy {way.energies[0]:.4f} at t = 0, {way.energies[-1]:.4f} at the end")
    typer.echo(f"Drawn to {out}")


@app.command()
def convergence(out: Out) -> None:
    """Draw errors of the maps against ε and particles."""
    _prepare(out)
    from sinkformers.lab.reporting.panels import save
    from sinkformers.lab.theory import pictures, study

    result = study.convergence()
    with _refusing_to_write(out):
        save(pictures.draw_sweeps(result), out)
    for each in result:
        orders = ", ".join(f"{name} {order:.2f}" for name, order in each.orders.items())
        typer.echo(f"{each.title}. Orders: {orders}")
    typer.echo(f"Drawn to {out}")


def _prepare(out: Path, formats: tuple[str, ...] = FORMATS) -> None:
    """Refuse a picture that could not be written, before it is computed."""
    if out.is_dir():
        refuse(f"--out must name a file, but {out} is a folder; try {out / 'figure.png'}.")
    if out.suffix.lower() not in formats:
        refuse(f"--out must end in {', '.join(formats)}, which choose the format; got {out}.")
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
