"""How far runs are, read from their folders: what any process can know of the runs that others train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sinkformers.lab.artefacts.artefact import LOG_FILE, METRICS_FILE, Artefact, ExperimentError, Run
from sinkformers.lab.workbench.display import Display


def is_done(out: Path, run: Run) -> bool:
    """Return whether a run is finished."""
    return (out / run.folder / METRICS_FILE).exists()


def may_begin(out: Path, run: Run) -> bool:
    """Return whether the run that this one continues, if any, is finished."""
    return run.before is None or (out / run.before / METRICS_FILE).exists()


def epochs_done(out: Path, run: Run) -> int | None:
    """Return the last epoch in the log of a run; None if the run has not begun."""
    try:
        return (out / run.folder / LOG_FILE).read_bytes().count(b"\n") - 1
    except OSError:
        return None


def expected_epochs(artefact: Artefact, runs: Sequence[Run]) -> dict[str, int]:
    """Return how many epochs runs train for, by their names."""
    configs = {run.name: artefact.presets[run.preset].config.with_settings(run.arm.settings) for run in runs}
    return {name: config.recipe.epochs for name, config in configs.items()}


def refuse_without_start(runs: Sequence[Run], out: Path) -> None:
    """Refuse runs that continue one that is neither finished nor among them."""
    chosen = {run.folder for run in runs}
    for run in runs:
        if not may_begin(out, run) and run.before not in chosen:
            raise ExperimentError(
                f"{run.name} continues with the model of {run.arm.after}, and {out / str(run.before)} is not "
                f"finished. Leave --arms out, or run --arms {run.arm.after} first."
            )


def show(display: Display, runs: Sequence[Run], done: set[Path], out: Path) -> None:
    """Show the progress of runs that other processes train, and add the folders of finished ones to `done`."""
    for run in runs:
        if run.folder not in done and is_done(out, run):
            done.add(run.folder)
            display.say(f"{run.name}: done")
    display.runs(len(done), len(runs))
    running = {run.name: epochs_done(out, run) for run in runs if run.folder not in done}
    display.show_epochs({name: epoch for name, epoch in running.items() if epoch is not None})
