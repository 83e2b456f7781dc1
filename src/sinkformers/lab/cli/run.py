"""`sinkformers run`: train the models that an artefact of the paper compares, then report the results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sinkformers.lab.cli.cluster import ClusterOptions, preview, train_in_jobs
from sinkformers.lab.cli.refusal import STOPPED, need, refuse

if TYPE_CHECKING:
    from sinkformers.lab.artefacts.artefact import Artefact, Preset, Run

SAVING = "Saving after this step; interrupt again to end at once."


def run(
    artefact: Annotated[str, typer.Argument(help="Its name; `sinkformers list` shows all.", metavar="ARTEFACT")],
    preset: Annotated[
        str, typer.Option(help="The scale: paper, authors, medium, small or smoke.", metavar="NAME")
    ] = "small",
    seeds: Annotated[str | None, typer.Option(help="Such as 0-4 or 0,2; by default, those of the preset.")] = None,
    n_iters: Annotated[str | None, typer.Option(help="Such as 1,5,inf; by default, those of the preset.")] = None,
    arms: Annotated[
        list[str] | None, typer.Option(help="A pattern of names of arms, such as 'patch-7-*'; may be repeated.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The folder of the data sets; else $SINKFORMERS_DATA, else the user's cache.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for runs and reports.")] = Path("runs"),
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to train.")] = "auto",
    precision: Annotated[Literal["no", "bf16", "fp16"], typer.Option(help="Mixed precision.")] = "no",
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs trained in parallel, each on its share of the cores; by default 1, "
            "and on a Slurm cluster as many as it allows.",
            min=1,
        ),
    ] = None,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", min=0)] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be trained or submitted.")] = False,
    cluster: Annotated[
        Literal["slurm", "local"] | None, typer.Option(help="Train every run in a job: of Slurm, or on this machine.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Of the Slurm cluster; else its default.", metavar="P")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of a job, one process each; by default 0.", min=0)] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of each process of a job; by default 1.", min=1)] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that train a run together; by default, one per GPU.", min=1)
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="Time limit of a job, such as 30 (minutes), 4:00:00 (the default on Slurm) or 2-0 (days); "
            "a run that needs longer is queued again, and continues.",
            metavar="T",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the progress of jobs of Slurm until they have ended, then report.")
    ] = False,
) -> None:
    """Train the missing runs of an artefact, then report.

    Ctrl-C saves the current run and stops; the same command continues from there. Press it again to end at once.
    Several commands may share one --out. With --cluster slurm, the command submits jobs and returns.
    """
    from sinkformers.lab.workbench.stopping import WORKER

    options = ClusterOptions(cluster, partition, gpus, cpus, processes, time, wait)
    options.check(device)
    with _stopped_in_one_sentence():
        chosen, runs = _select(artefact, preset, seeds, n_iters, arms or [])
        if chosen.make is not None:
            if cluster is not None:
                refuse(f"{artefact} trains nothing, so that there are no jobs; leave --cluster out.")
            _make(chosen.make, chosen.presets[preset], out / artefact / preset, dry_run)
            return
        _check_folders(chosen.presets[preset], runs, out, data)
        need("experiments", ("accelerate", "filelock", "safetensors", "tensorboard"), "experiments")
        if (jobs or 1) > 1 and "RANK" in os.environ:
            refuse("--jobs cannot be used with torchrun, which starts several processes itself; leave it out.")
        shared = {"data": data, "device": device, "precision": precision, "save_every": save_every}
        if dry_run:
            preview(options, options.request(runs, out, jobs, n_iters=n_iters, **shared))
            return
        if cluster is not None:
            train_in_jobs(options, options.request(runs, out, jobs, n_iters=n_iters, **shared), chosen)
        elif (jobs or 1) > 1:
            _side_by_side(jobs or 1, chosen, runs, out)
        else:
            _train(chosen, preset, runs, out, **shared)
    if os.environ.get("RANK", "0") == "0" and WORKER not in os.environ:
        from sinkformers.lab.cli.report import report

        report([out / artefact / preset])


@contextmanager
def _stopped_in_one_sentence() -> Iterator[None]:
    """Say what the same command will do next if the command is stopped."""
    from sinkformers.lab.workbench.stopping import FINISHED, Stopped

    try:
        yield
    except Stopped as stopped:
        if os.environ.get("RANK", "0") != "0":
            raise typer.Exit(stopped.code) from None
        refuse(f"stopped. {stopped.what_next}", stopped.code)
    except KeyboardInterrupt:
        refuse(f"stopped. {FINISHED}", STOPPED)


def _select(
    name: str, preset: str, seeds: str | None, n_iters: str | None, arms: list[str]
) -> tuple[Artefact, list[Run]]:
    from sinkformers.lab.artefacts import selection

    artefact = selection.artefact_named(name)
    return artefact, selection.select_runs(artefact, preset, seeds=seeds, n_iters=n_iters, arms=arms)


def _check_folders(preset: Preset, runs: list[Run], out: Path, data: Path | None) -> None:
    """Refuse folders that do not exist before torch is imported. Runs that are finished need no data."""
    from sinkformers.lab.artefacts.artefact import METRICS_FILE
    from sinkformers.lab.data import CATALOGUE, data_folder

    if all((out / run.folder / METRICS_FILE).exists() for run in runs):
        return
    existing = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not existing.is_dir():
        refuse(f"cannot use {out}: {existing} is not a folder. Choose another --out, one that can be written.")
    if preset.data in CATALOGUE and CATALOGUE[preset.data].files:
        data_folder(data)


def _train(artefact: Artefact, preset: str, runs: list[Run], out: Path, **options: Any) -> None:
    from sinkformers.lab.workbench.display import Display
    from sinkformers.lab.workbench.runner import train_missing as train
    from sinkformers.lab.workbench.stopping import SILENT, WORKER, Stopping, end_of_launcher, end_of_pipe

    worker, rank = os.environ.get(WORKER), os.environ.get("RANK")
    display = Display(quiet=worker == SILENT or (rank or "0") != "0")
    parent = None
    if worker:
        parent = partial(end_of_pipe, sys.stdin.fileno())
    elif rank is not None:  # torchrun forwards signals, except SIGKILL
        parent = partial(end_of_launcher, os.getppid())
    with Stopping(parent=parent, notice=lambda: display.say(SAVING)) as stopping:
        for run in train(artefact, preset, runs, out=out, display=display, stopping=stopping, **options):
            display.say(f"{run.name}: another process is training it.")


def _side_by_side(jobs: int, artefact: Artefact, runs: list[Run], out: Path) -> None:
    from sinkformers.lab.workbench.display import Display
    from sinkformers.lab.workbench.progress import expected_epochs
    from sinkformers.lab.workbench.stopping import SILENT, WORKER
    from sinkformers.lab.workbench.workers import side_by_side

    os.environ[WORKER] = SILENT
    command = [sys.executable, "-m", "sinkformers.lab.cli", *sys.argv[1:], "--jobs", "1"]
    display = Display()
    display.expect(expected_epochs(artefact, runs))
    code = side_by_side(command, jobs, runs, out, display)
    del os.environ[WORKER]
    if code:
        raise typer.Exit(code=code)


def _make(make: Callable[[Preset, Path], str], preset: Preset, folder: Path, dry_run: bool) -> None:
    if dry_run:
        print(f"Nothing is trained: the result would be written to {folder}")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        print(make(preset, folder))
    except OSError as error:
        refuse(f"cannot write {folder}: {error.strerror or error}. Choose another --out, one that can be written.")
    print(f"Drawn to {folder}")
