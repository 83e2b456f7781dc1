"""Run the cells of a preset that are not finished and that nobody else is training."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from sinkformers.data import heard_by
from sinkformers.experiments.artefact import LOG, METRICS, MODEL, RUN, Artefact, Cell, ExperimentError, Preset, anew
from sinkformers.experiments.workbench import checkpoint, training
from sinkformers.experiments.workbench.cells import Claim, claim
from sinkformers.experiments.workbench.display import Display
from sinkformers.experiments.workbench.provenance import provenance
from sinkformers.experiments.workbench.task import Keeps
from sinkformers.experiments.workbench.twins import find_twin, json_bytes, take_over


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
) -> list[Cell]:
    """Train what is missing of `cells` and return those that others are training."""
    _refuse_orphans(cells, out)
    accelerator = _accelerator(device, precision)
    with _process_group(), display:
        display.cells(sum(_is_done(out, cell) for cell in cells), len(cells))
        for cell, held in _claimed(cells, out, accelerator):
            with held or nullcontext():
                _train(artefact, artefact.presets[preset_name], cell, data, out, accelerator, held, display, save_every)
            accelerator.free_memory()
            display.cells(sum(_is_done(out, cell) for cell in cells), len(cells))
        accelerator.wait_for_everyone()
    return [cell for cell in cells if not _is_done(out, cell)]


def _claimed(cells: Sequence[Cell], out: Path, accelerator: Accelerator) -> Iterator[tuple[Cell, Claim | None]]:
    """Cells to train. The first process claims for all of them, and holds the claim."""
    for cell in cells:
        held = None
        if accelerator.is_main_process and not _is_done(out, cell) and _may_begin(out, cell):
            held = claim(out / cell.folder)
            if held is not None and _is_done(out, cell):  # finished between the look and the claim
                held.file.unlink(missing_ok=True)
                held = None
        chosen = held is not None
        if accelerator.num_processes > 1:
            chosen = broadcast_object_list([chosen])[0]
        if chosen:
            yield cell, held


def _train(
    artefact: Artefact,
    preset: Preset,
    cell: Cell,
    data: Path | None,
    out: Path,
    accelerator: Accelerator,
    held: Claim | None,
    display: Display,
    save_every: float,
) -> None:
    assert artefact.task is not None
    folder = out / cell.folder
    if preset.data:
        display.say(f"{cell.name}: reading {preset.data}.")
    with heard_by(display.loading):
        task = artefact.task(preset, cell.arm, cell.seed, data)
    display.begin(cell.name, task.recipe.epochs)
    identity = {"seed": cell.seed, "settings": dict(cell.arm.settings), **task.facts}
    where = {
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "precision": accelerator.mixed_precision,
    }
    twin = None if cell.before is not None else find_twin(out, artefact.twins, identity, where)
    if twin is not None:
        if held is not None:
            held.check()
            take_over(cell, folder, twin, out)
            display.say(f"{cell.name}: taken over from {twin.relative_to(out)}, which is the same training.")
        return
    if (folder / training.CHECKPOINT).exists():
        display.say(f"{cell.name}: goes on where it was stopped.")
    for left in (*folder.glob("*.partial"), *folder.glob("draft-*")):  # by a process that was killed while writing
        left.unlink(missing_ok=True)
    start = None if cell.before is None else checkpoint.read(out / cell.before / MODEL, anew(out / cell.before))[0]
    log = _Log(folder, accelerator.is_main_process)

    def epoch(record: dict[str, Any], seconds: float) -> None:
        log.add(record, seconds)
        display.epoch(record, seconds)

    hooks = training.Hooks(display.step, epoch, lambda: None if held is None else held.check())
    with log:
        done = training.Training(task, identity, folder, accelerator, hooks, start).run(save_every)
    if held is None:
        return
    held.check()
    metrics = {
        "artefact": cell.artefact,
        "preset": cell.preset,
        "arm": cell.arm.name,
        **({} if cell.arm.after is None else {"after": cell.arm.after}),
        "metric": artefact.metric_of(cell.preset),
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
