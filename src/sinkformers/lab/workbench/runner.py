"""Run the cells of a preset that are not finished and that nobody else is training."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from sinkformers.lab.artefacts.artefact import LOG, METRICS, MODEL, RUN, Artefact, Cell, ExperimentError, Preset, anew
from sinkformers.lab.data import heard_by
from sinkformers.lab.workbench import checkpoint, training
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.identical_runs import find_twin, json_bytes, take_over
from sinkformers.lab.workbench.locks import Claim, claim
from sinkformers.lab.workbench.provenance import provenance
from sinkformers.lab.workbench.stopping import Stopped, Stopping
from sinkformers.lab.workbench.task import Keeps, Task


def run(
    artefact: Artefact,
    preset_name: str,
    cells: Sequence[Cell],
    *,
    data: Path | None,
    out: Path,
    display: Display,
    device: str = "auto",
    precision: str = "no",
    save_every: float,
    stopping: Stopping | None = None,
) -> list[Cell]:
    """Train what is missing of `cells` and return those that others are training.

    Raises `Stopped` where `stopping` was asked to end; the cell in training is saved first.
    """
    _refuse_orphans(cells, out)
    accelerator = _accelerator(device, precision)
    stopping = stopping or Stopping()
    runs = _Runs(artefact, artefact.presets[preset_name], data, out, accelerator, display, save_every, stopping)
    with _process_group(), display:
        display.cells(sum(_is_done(out, cell) for cell in cells), len(cells))
        for cell, held in _claimed(cells, out, accelerator):
            with held or nullcontext(), _saying_what_next(cell, out):
                runs.train(cell, held)
            accelerator.free_memory()
            display.cells(sum(_is_done(out, cell) for cell in cells), len(cells))
            number = training.agreed(accelerator, stopping.number)
            if number is not None:
                raise Stopped(number)
        accelerator.wait_for_everyone()
    return [cell for cell in cells if not _is_done(out, cell)]


@contextmanager
def _saying_what_next(cell: Cell, out: Path) -> Iterator[None]:
    """Let a `Stopped` say what the same command will do with this cell: what is on disk decides."""
    try:
        yield
    except Stopped as stopped:
        if stopped.saved:
            stopped.what_next = f"{cell.name} is saved at {stopped.saved}; the same command goes on there."
        elif (out / cell.folder / training.CHECKPOINT).exists():
            stopped.what_next = f"The same command goes on with {cell.name} from its last checkpoint."
        else:
            stopped.what_next = f"{cell.name} has saved nothing yet; the same command begins it again."
        raise


def _claimed(cells: Sequence[Cell], out: Path, accelerator: Accelerator) -> Iterator[tuple[Cell, Claim | None]]:
    """Cells to train. The first process claims for all of them, and holds the claim."""
    for cell in cells:
        held = None
        if accelerator.is_main_process and not _is_done(out, cell) and _may_begin(out, cell):
            held = claim(out / cell.folder)
            if held is not None and _is_done(out, cell):  # finished between the look and the claim
                held.file.unlink(missing_ok=True)
                held = None
        if training.agreed(accelerator, held is not None):
            yield cell, held


class _Runs(NamedTuple):
    """What the runs of one command share."""

    artefact: Artefact
    preset: Preset
    data: Path | None
    out: Path
    accelerator: Accelerator
    display: Display
    save_every: float
    stopping: Stopping

    def train(self, cell: Cell, held: Claim | None) -> None:
        """Train a cell, or take it over from its twin, and write its record. Only the process that `held` the claim
        writes."""
        assert self.artefact.task is not None
        folder, display, accelerator = self.out / cell.folder, self.display, self.accelerator
        if self.preset.data:
            display.say(f"{cell.name}: reading {self.preset.data}.")
        with heard_by(display.loading):
            task = self.artefact.task(self.preset, cell.arm, cell.seed, self.data)
        display.begin(cell.name, task.recipe.epochs)
        identity = {"seed": cell.seed, "settings": dict(cell.arm.settings), **task.facts}
        where = {
            "processes": accelerator.num_processes,
            "device": accelerator.device.type,
            "precision": accelerator.mixed_precision,
        }
        twin = None if cell.before is not None else find_twin(self.out, self.artefact.twins, identity, where)
        if twin is not None:
            if held is not None:
                held.check()
                take_over(cell, folder, twin, self.out)
                display.say(f"{cell.name}: taken over from {twin.relative_to(self.out)}, which is the same training.")
            return
        for left in (*folder.glob("*.partial"), *folder.glob("draft-*")):  # by a process that was killed while writing
            left.unlink(missing_ok=True)
        before = None if cell.before is None else self.out / cell.before
        start = None if before is None else checkpoint.read(before / MODEL, anew(before))[0]
        log = _Log(folder, accelerator.is_main_process)

        def epoch(record: dict[str, Any], seconds: float) -> None:
            log.add(record, seconds)
            display.epoch(record, seconds)

        hooks = training.Hooks(
            display.step,
            epoch,
            lambda: None if held is None else held.check(),
            lambda where: display.say(f"{cell.name}: goes on after {where}."),
        )
        with log, self.stopping.deferred():  # what was trained to the end is written
            done = training.Training(task, identity, folder, accelerator, hooks, start, self.stopping)
            self._write(cell, held, task, identity, where, done.run(self.save_every))

    def _write(
        self,
        cell: Cell,
        held: Claim | None,
        task: Task,
        identity: dict[str, Any],
        where: dict[str, Any],
        done: training.Trained,
    ) -> None:
        if held is None:
            return
        held.check()
        folder = self.out / cell.folder
        metrics = {
            "artefact": cell.artefact,
            "preset": cell.preset,
            "arm": cell.arm.name,
            **({} if cell.arm.after is None else {"after": cell.arm.after}),
            "metric": self.artefact.metric_of(cell.preset),
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
        checkpoint.write(folder / MODEL, done.model.state_dict(), {"settings": dict(cell.arm.settings)})
        for name, content in task.files().items() if isinstance(task, Keeps) else ():
            checkpoint.replace(folder / name, content)
        checkpoint.replace(folder / RUN, json_bytes(made))
        checkpoint.replace(folder / METRICS, json_bytes(metrics))  # last: with it the cell is finished
        (folder / training.CHECKPOINT).unlink(missing_ok=True)


class _Log:
    """A line an epoch for whoever looks on: JSON lines, and TensorBoard's own file. A repeated epoch has one line."""

    def __init__(self, folder: Path, wanted: bool) -> None:
        self.file, self.wanted = folder / LOG, wanted

    def __enter__(self) -> _Log:
        if self.wanted:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.file.parent / "tensorboard")
        return self

    def __exit__(self, *_: object) -> None:
        if self.wanted:
            self.board.close()

    def add(self, record: dict[str, Any], seconds: float) -> None:
        if not self.wanted:
            return
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        earlier = [line for line in lines if _epoch_of(line) < record["epoch"]]
        line = json.dumps({**record, "seconds": round(seconds, 3)})
        checkpoint.replace(self.file, "\n".join([*earlier, line, ""]).encode())
        for part in ("train", "test", "columns"):
            for name, value in record.get(part, {}).items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{part}/{name}", value, record["epoch"])


def _epoch_of(line: str) -> int:
    try:
        return json.loads(line)["epoch"]
    except (ValueError, KeyError):
        return 2**31  # damaged: left out


def _is_done(out: Path, cell: Cell) -> bool:
    return (out / cell.folder / METRICS).exists()


def _may_begin(out: Path, cell: Cell) -> bool:
    """A cell waits for the one that it goes on with. Whoever trains that one comes to this one next."""
    return cell.before is None or (out / cell.before / METRICS).exists()


def _refuse_orphans(cells: Sequence[Cell], out: Path) -> None:
    chosen = {cell.folder for cell in cells}
    for cell in cells:
        if not _may_begin(out, cell) and cell.before not in chosen:
            raise ExperimentError(
                f"{cell.name} goes on with the model of {cell.arm.after}, and {out / str(cell.before)} is not "
                f"finished. Leave --arms out, or run --arms {cell.arm.after} first."
            )


def _accelerator(device: str, precision: str) -> Accelerator:
    if device == "cuda" and not torch.cuda.is_available():
        raise ExperimentError("--device cuda: this PyTorch sees no GPU. Use --device cpu.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ExperimentError("--device mps: this PyTorch sees no Apple GPU. Use --device cpu.")
    # Told nothing, accelerate leaves the processes of torchrun apart where there is no GPU.
    cpu = device == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate's remarks about machines
        return Accelerator(cpu=cpu, mixed_precision=precision)


@contextmanager
def _process_group() -> Iterator[None]:
    """Leave the process group in order: gloo may abort a process that ends within one."""
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
