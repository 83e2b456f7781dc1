"""Train the runs of a preset that are neither finished nor locked by another process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from sinkformers.lab.artefacts.artefact import (
    METRICS_FILE,
    MODEL_FILE,
    RUN_FILE,
    Artefact,
    ExperimentError,
    Preset,
    Run,
    retrain_hint,
)
from sinkformers.lab.data import heard_by
from sinkformers.lab.workbench import checkpoint, training
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.epoch_log import EpochLog
from sinkformers.lab.workbench.identical_runs import copy_run, find_identical, json_bytes
from sinkformers.lab.workbench.locks import locked
from sinkformers.lab.workbench.progress import is_done, may_begin, refuse_without_start
from sinkformers.lab.workbench.provenance import provenance
from sinkformers.lab.workbench.stopping import Stopped, Stopping
from sinkformers.lab.workbench.task import HasFiles, Task


def train_missing(
    artefact: Artefact,
    preset_name: str,
    runs: Sequence[Run],
    *,
    data: Path | None,
    out: Path,
    display: Display,
    device: str = "auto",
    precision: str = "no",
    save_every: float,
    stopping: Stopping | None = None,
) -> list[Run]:
    """Train those of `runs` that are missing, and return those that other processes are training.

    Raises:
        Stopped: if `stopping` received a signal; the run in training is saved first.
        ExperimentError: if a run continues one that is neither finished nor among `runs`.
    """
    refuse_without_start(runs, out)
    accelerator = _accelerator(device, precision)
    stopping = stopping or Stopping()
    session = _Session(artefact, artefact.presets[preset_name], data, out, accelerator, display, save_every, stopping)
    with _process_group(), display:
        display.runs(sum(is_done(out, run) for run in runs), len(runs))
        for run in runs:
            with ExitStack() as stack:
                if not _locked(run, out, accelerator, stack):
                    continue
                with _saying_what_next(run, out):
                    session.train(run)
            accelerator.free_memory()
            display.runs(sum(is_done(out, run) for run in runs), len(runs))
            number = training.agreed(accelerator, stopping.number)
            if number is not None:
                raise Stopped(number)
        accelerator.wait_for_everyone()
    return [run for run in runs if not is_done(out, run)]


@contextmanager
def _saying_what_next(run: Run, out: Path) -> Iterator[None]:
    """Let a `Stopped` say what the same command will do with this run, from what is on disk."""
    try:
        yield
    except Stopped as stopped:
        if stopped.saved:
            stopped.what_next = f"{run.name} is saved at {stopped.saved}; the same command continues there."
        elif (out / run.folder / training.CHECKPOINT).exists():
            stopped.what_next = f"The same command continues with {run.name} from its last checkpoint."
        else:
            stopped.what_next = f"{run.name} has saved nothing yet; the same command begins it again."
        raise


def _locked(run: Run, out: Path, accelerator: Accelerator, stack: ExitStack) -> bool:
    """Lock a run that is to be trained; return whether that succeeded. The main process locks for all processes."""
    held = accelerator.is_main_process and not is_done(out, run) and may_begin(out, run)
    held = held and stack.enter_context(locked(out / run.folder))
    held = held and not is_done(out, run)  # finished by another process just before it was locked
    return training.agreed(accelerator, held)


class _Session(NamedTuple):
    """What the runs of one command share."""

    artefact: Artefact
    preset: Preset
    data: Path | None
    out: Path
    accelerator: Accelerator
    display: Display
    save_every: float
    stopping: Stopping

    def train(self, run: Run) -> None:
        """Train a run, or copy an identical one, and write its record. Only the main process writes."""
        assert self.artefact.task is not None
        folder, display, accelerator = self.out / run.folder, self.display, self.accelerator
        if self.preset.data:
            display.say(f"{run.name}: reading {self.preset.data}.")
        with heard_by(display.loading):
            task = self.artefact.task(self.preset, run.arm, run.seed, self.data)
        display.begin(run.name, task.recipe.epochs)
        identity = {"seed": run.seed, "settings": dict(run.arm.settings), **task.facts}
        where = {
            "processes": accelerator.num_processes,
            "device": accelerator.device.type,
            "precision": accelerator.mixed_precision,
        }
        others = self.artefact.identical_runs_in if run.before is None else ()
        identical = find_identical(self.out, others, identity, where)
        if identical is not None:
            if accelerator.is_main_process:
                copy_run(run, folder, identical, self.out)
                display.say(f"{run.name}: copied from {identical.relative_to(self.out)}, which is the same training.")
            return
        for partial in folder.glob("*.partial"):  # left by a process that was killed while writing
            partial.unlink(missing_ok=True)
        before = None if run.before is None else self.out / run.before
        start = None if before is None else checkpoint.read(before / MODEL_FILE, retrain_hint(before))[0]
        log = EpochLog(folder, enabled=accelerator.is_main_process)

        def epoch(record: dict[str, Any], seconds: float) -> None:
            log.add(record, seconds)
            display.epoch(record, seconds)

        hooks = training.Hooks(
            display.step,
            epoch,
            lambda where: display.say(f"{run.name}: continues after {where}."),
        )
        with log, self.stopping.deferred():  # a finished training is written before the process stops
            done = training.Training(task, identity, folder, accelerator, hooks, start, self.stopping)
            self._write(run, task, identity, where, done.run(self.save_every))

    def _write(
        self,
        run: Run,
        task: Task,
        identity: dict[str, Any],
        where: dict[str, Any],
        done: training.Trained,
    ) -> None:
        if not self.accelerator.is_main_process:
            return
        folder = self.out / run.folder
        metrics = {
            "artefact": run.artefact,
            "preset": run.preset,
            "arm": run.arm.name,
            **({} if run.arm.after is None else {"after": run.arm.after}),
            "metric": self.artefact.metric_of(run.preset),
            **identity,
            "parameters": sum(parameter.numel() for parameter in done.model.parameters()),
            "epochs": done.epochs,
        }
        made = {
            **provenance(),
            **where,
            "resumed": done.resumed,
            "seconds_per_epoch": [round(seconds, 3) for seconds in done.seconds],
        }
        checkpoint.write(folder / MODEL_FILE, done.model.state_dict(), {"settings": dict(run.arm.settings)})
        for name, content in task.files().items() if isinstance(task, HasFiles) else ():
            checkpoint.replace(folder / name, content)
        checkpoint.replace(folder / RUN_FILE, json_bytes(made))
        checkpoint.replace(folder / METRICS_FILE, json_bytes(metrics))  # last: it marks the run as finished
        (folder / training.CHECKPOINT).unlink(missing_ok=True)


def _accelerator(device: str, precision: str) -> Accelerator:
    if device == "cuda" and not torch.cuda.is_available():
        raise ExperimentError("--device cuda: this PyTorch sees no GPU. Use --device cpu.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ExperimentError("--device mps: this PyTorch sees no Apple GPU. Use --device cpu.")
    # By default, accelerate does not connect the processes of torchrun on machines without a GPU.
    cpu = device == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate warns about the machine
        return Accelerator(cpu=cpu, mixed_precision=precision)


@contextmanager
def _process_group() -> Iterator[None]:
    """Destroy the process group at the end: gloo may abort a process that exits within one."""
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
