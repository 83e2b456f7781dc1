"""`sinkformers run`: train what an artefact of the paper compares, then its table, its figure and its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from sinkformers.cli.refusal import refuse


def run(
    artefact: Annotated[str, typer.Argument(help="Its name; `sinkformers list` shows all.", metavar="ARTEFACT")],
    preset: Annotated[str, typer.Option(help="The scale: paper, authors, small or smoke.", metavar="NAME")] = "small",
    seeds: Annotated[str | None, typer.Option(help="Such as 0-4 or 0,2; those of the preset if left out.")] = None,
    n_iters: Annotated[str | None, typer.Option(help="Such as 1,5; those of the preset if left out.")] = None,
    arms: Annotated[
        list[str] | None, typer.Option(help="A pattern of arms' names, such as 'patch-7-*'; may be repeated.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The folder of data sets; else $SINKFORMERS_DATA, else a cache of yours.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where cells and reports go.")] = Path("runs"),
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to train.")] = "auto",
    precision: Annotated[Literal["no", "bf16", "fp16"], typer.Option(help="Mixed precision.")] = "no",
    jobs: Annotated[int, typer.Option(help="Cells trained side by side, on their share of the cores.", min=1)] = 1,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", min=0)] = 30.0,
) -> None:
    """Train what is missing of an artefact, then print its table and write its report.

    Stop it whenever you like: the same command goes on where it was, and any number of them may share one --out.
    """
    if jobs > 1:
        _side_by_side(jobs)
    else:
        _train(artefact, preset, seeds, n_iters, arms or [], data, out, device, precision, save_every)
    if os.environ.get("RANK", "0") == "0" and "SINKFORMERS_WORKER" not in os.environ:
        _report(artefact, preset, out)


def _train(
    name: str,
    preset_name: str,
    seeds: str | None,
    n_iters: str | None,
    arms: list[str],
    data: Path | None,
    out: Path,
    device: str,
    precision: str,
    save_every: float,
) -> None:
    try:
        import accelerate  # noqa: F401
        import tensorboard  # noqa: F401
    except ModuleNotFoundError as missing:
        refuse(f"experiments need {missing.name}; install it with pip install 'sinkformers[experiments]'.")
    from sinkformers.data import DataError
    from sinkformers.experiments import selection
    from sinkformers.experiments.artefact import ExperimentError
    from sinkformers.experiments.display import Display
    from sinkformers.experiments.runner import run as train

    try:
        artefact = selection.artefact_named(name)
        cells = selection.cells(artefact, preset_name, seeds=seeds, n_iters=n_iters, arms=arms)
        if artefact.make is not None:
            return
        display = Display(quiet=os.environ.get("RANK", "0") != "0")
        options = {"device": device, "precision": precision, "save_every": save_every}
        elsewhere = train(artefact, preset_name, cells, data=data, out=out, display=display, **options)
        for cell in elsewhere:
            display.say(f"{cell.arm.name}, seed {cell.seed}: another process is training it.")
    except (ExperimentError, DataError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        refuse("stopped. The same command goes on where it was.")


def _side_by_side(jobs: int) -> None:
    """The same command `jobs` times; the claims on cells keep the processes out of each other's way."""
    words = sys.argv[1:]
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "SINKFORMERS_WORKER": "1"}
    command = [sys.executable, "-m", "sinkformers.cli", *words, "--jobs", "1"]
    workers = [subprocess.Popen(command, env=environment) for _ in range(jobs)]
    try:
        codes = [worker.wait() for worker in workers]
    except KeyboardInterrupt:
        for worker in workers:
            worker.terminate()
        refuse("stopped. The same command goes on where it was.")
    if any(codes):
        raise typer.Exit(code=max(codes))


def _report(name: str, preset: str, out: Path) -> None:
    from sinkformers.experiments import selection

    artefact = selection.artefact_named(name)
    folder = out / name / preset
    if artefact.make is None:
        from sinkformers.cli.report import report

        report([folder])
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        typer.echo(artefact.make(folder))
    except OSError as error:
        refuse(f"cannot write {folder}: {error.strerror or error}. Choose another --out, one that can be written.")
    typer.echo(f"Drawn to {folder}")
