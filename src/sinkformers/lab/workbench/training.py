"""The training loop of all experiments.

It may be killed at any time. The same command then resumes the run from its last checkpoint, even in the middle of an
epoch, and gives the same numbers to the last bit. On Ctrl-C or SIGTERM it saves a checkpoint after the current step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import Tensor, nn
from torch.optim import Optimizer

from sinkformers.lab.artefacts import record_json
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.workbench import checkpoint
from sinkformers.lab.workbench.stopping import Stopped, Stopping
from sinkformers.lab.workbench.task import Task

CHECKPOINT = "checkpoint.safetensors"
T = TypeVar("T")


class Hooks(NamedTuple):
    """Called after every step (epoch, step, number of steps), after every epoch (its record and seconds), and when a
    training resumes from a checkpoint (its position)."""

    step: Callable[[int, int, int], None]
    epoch: Callable[[dict[str, Any], float], None]
    resumed: Callable[[str], None] = lambda where: None


class Trained(NamedTuple):
    model: nn.Module
    epochs: list[dict[str, Any]]  # the record of each, epoch 0 being before training
    seconds: list[float]  # of training, for each epoch except 0
    resumed: int  # how often the run was resumed


class Training:
    """A run in training: the model, its optimiser and the progress."""

    def __init__(
        self,
        task: Task,
        identity: Mapping[str, Any],
        folder: Path,
        accelerator: Accelerator,
        hooks: Hooks,
        start: Mapping[str, Tensor] | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        """Prepare the training.

        Args:
            task: data, model and metrics.
            identity: the seed, and everything else that distinguishes this run from others.
            folder: where checkpoints go.
            accelerator: device and processes.
            hooks: functions to call.
            start: initial weights, if the model does not start from random ones.
            stopping: receives signals.
        """
        self.task, self.folder, self.accelerator, self.hooks = task, folder, accelerator, hooks
        self.stopping = stopping or Stopping()
        self.identity = {**identity, "precision": accelerator.mixed_precision}
        seed = identity["seed"]
        set_seed(seed)
        model = task.model().to(accelerator.device)
        if start is not None:
            model.load_state_dict(start)
        self.optimiser: Optimizer
        self.model: nn.Module
        self.model, self.optimiser = accelerator.prepare(model, task.recipe.build(model))
        set_seed(seed, device_specific=True)
        self.epoch, self.step = 0, 0  # steps done of the epoch that runs
        self.earlier = 0  # steps done in the epochs before it
        self.sums: dict[str, Tensor] = {}  # over the steps done
        self.records: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.spent = 0.0  # on the steps done
        self.resumed = 0

    @property
    def bare(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    @property
    def where(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.step}"

    def run(self, save_every: float) -> Trained:
        """Train to the end. Between steps, a checkpoint is saved if the last one is `save_every` seconds old."""
        with self.stopping.deferred():
            if (self.folder / CHECKPOINT).exists():
                self._load()
                self.hooks.resumed(self.where)
            else:
                self._finish_epoch(0, 0, {})
            saved = time.monotonic()
            while self.epoch < self.task.recipe.epochs:
                saved = self._train_epoch(self.epoch + 1, save_every, saved)
        return Trained(self.bare, self.records, self.seconds, self.resumed)

    def _train_epoch(self, epoch: int, save_every: float, saved: float) -> float:
        batches = self.task.batches(epoch)
        self.model.train()
        for step in range(self.step, len(batches)):
            started = time.perf_counter()
            for group in self.optimiser.param_groups:
                group["lr"] = self.task.recipe.rate_at(epoch, self.earlier + step + 1)
            self._step(batches[step])
            self.step = step + 1
            self.spent += time.perf_counter() - started
            self.hooks.step(epoch, self.step, len(batches))
            state = time.monotonic() - saved >= save_every, self.stopping.number
            due, number = agreed(self.accelerator, state)
            if number is not None:
                self._save_and_stop(Stopped(number))
            if due:
                self._save()
                saved = time.monotonic()
        total = sum(self.task.weight(batch) for batch in batches)
        sums = {name: torch.as_tensor(self.accelerator.reduce(value)) for name, value in self.sums.items()}
        self._finish_epoch(epoch, len(batches), {name: float(value) / total for name, value in sums.items()})
        return saved

    def _step(self, batch: Tensor) -> None:
        """Take one step on a batch, split into parts that are distributed among the processes."""
        processes, mine = self.accelerator.num_processes, self.accelerator.process_index
        parts = batch.tensor_split(self.task.recipe.accumulate * processes)[mine::processes]
        share = processes / self.task.weight(batch)  # DDP averages over processes, the loss is a mean over the batch
        for index, examples in enumerate(parts):
            last = index == len(parts) - 1
            # With fewer examples than parts, the first is used again with weight 0: each process must call backward.
            seen, counts = (examples, 1.0) if len(examples) else (batch[:1], 0.0)
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss, sums = self.task.losses(self.model, seen)
                self.accelerator.backward(loss * share * counts)
            for name, value in {"loss": loss.detach(), **sums}.items():
                self.sums[name] = self.sums.get(name, value.new_zeros((), dtype=torch.float64)) + value * counts
        self.optimiser.step()
        self.optimiser.zero_grad()

    def _finish_epoch(self, epoch: int, steps: int, train: dict[str, float]) -> None:
        """Evaluate after an epoch of `steps` steps, and record it. Epoch 0 is before training."""
        generators = self._generators()
        try:
            # If several processes evaluate together, none may stop alone.
            with self.stopping.immediate() if self.accelerator.num_processes == 1 else nullcontext():
                self.model.eval()
                test, seen = self.task.evaluate(self.model, self.accelerator), self.task.observe(self.bare)
        except Stopped as stopped:
            if not epoch:
                raise
            self._seed(generators)  # evaluation may have used random numbers, and will be repeated
            self._save_and_stop(stopped)
        rate = self.task.recipe.rate_at(max(epoch, 1), max(self.earlier + steps, 1))
        self.records.append(_rounded({"epoch": epoch, "rate": rate, "train": train, "test": test, **seen}))
        if epoch:
            self.seconds.append(self.spent)
        self.epoch, self.step, self.sums, self.spent = epoch, 0, {}, 0.0
        self.earlier += steps
        self.hooks.epoch(self.records[-1], self.seconds[-1] if self.seconds else 0.0)

    def _save_and_stop(self, stopped: Stopped) -> NoReturn:
        self._save()
        stopped.saved = self.where
        raise stopped

    def _generators(self) -> dict[str, Tensor]:
        cuda = self.accelerator.device.type == "cuda"
        return {
            "generator": torch.get_rng_state(),
            **({"device_generator": torch.cuda.get_rng_state()} if cuda else {}),
        }

    def _seed(self, generators: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(generators["generator"])
        if self.accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(generators["device_generator"])

    def _save(self) -> None:
        each = {**self._generators(), **{f"sums.{name}": value.cpu() for name, value in self.sums.items()}}
        every = gather_object([each])
        if not self.accelerator.is_main_process:
            return
        tensors = {f"model.{name}": value for name, value in self.bare.state_dict().items()}
        inner = getattr(self.optimiser, "optimizer", self.optimiser)
        tensors |= {f"optimiser.{name}": value for name, value in checkpoint.optimiser_tensors(inner).items()}
        for process, own in enumerate(every):
            tensors |= {f"process.{process}.{name}": value for name, value in own.items()}
        scaler = self.accelerator.scaler
        state = {
            "identity": self.identity,
            "processes": self.accelerator.num_processes,
            "epoch": self.epoch,
            "step": self.step,
            "records": self.records,
            "seconds": self.seconds,
            "spent": self.spent,
            "resumed": self.resumed,
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        checkpoint.write(self.folder / CHECKPOINT, tensors, state)

    def _load(self) -> None:
        path = self.folder / CHECKPOINT
        tensors, state = checkpoint.read(path)
        self._refuse_other(path, tensors, state)
        self.bare.load_state_dict(checkpoint.part(tensors, "model."))
        inner = getattr(self.optimiser, "optimizer", self.optimiser)
        checkpoint.restore_optimiser(inner, checkpoint.part(tensors, "optimiser."))
        own = checkpoint.part(tensors, f"process.{self.accelerator.process_index}.")
        self.sums = {name: value.to(self.accelerator.device) for name, value in checkpoint.part(own, "sums.").items()}
        self._seed(own)
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        for name in ("epoch", "step", "records", "seconds", "spent"):
            setattr(self, name, state[name])
        self.resumed = state["resumed"] + 1
        self.earlier = sum(len(self.task.batches(epoch)) for epoch in range(1, self.epoch + 1))

    def _refuse_other(self, path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model, another recipe or another number of processes."""
        remedy = "Use another --out, or delete the checkpoint to train this run from the start."
        here, there = record_json.as_read(self.identity), state["identity"]
        different = [name for name in here if here[name] != there.get(name)]
        if different:
            name = different[0]
            raise ExperimentError(
                f"the checkpoint {path} was written under another {name}: {there.get(name)}, now {here[name]}. {remedy}"
            )
        shapes = {name: tuple(value.shape) for name, value in self.bare.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in checkpoint.part(tensors, "model.").items()}
        if shapes != found:
            odd = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))[0]
            raise ExperimentError(
                f"the checkpoint {path} belongs to another model: {odd} is {found.get(odd, 'missing')} there "
                f"and {shapes.get(odd, 'missing')} here. {remedy}"
            )
        if state["processes"] != self.accelerator.num_processes:
            raise ExperimentError(
                f"the checkpoint {path} was written by {state['processes']} processes, and this run has "
                f"{self.accelerator.num_processes}. Run it with as many as before, or delete the checkpoint."
            )


def agreed(accelerator: Accelerator, value: T) -> T:
    """Return the value of the main process, in all processes."""
    return value if accelerator.num_processes == 1 else broadcast_object_list([value])[0]


def _rounded(value: Any) -> Any:
    """Round floats to seven digits, the precision of float32. NaN, which JSON does not have, becomes None (null)."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value
