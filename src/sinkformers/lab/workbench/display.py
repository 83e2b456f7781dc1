"""Progress of the runs: bars in a terminal, a line from time to time in a pipe."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sinkformers.lab.reporting.metrics import metric_named

PAUSE = 10.0  # minimum seconds between two lines in a pipe


class Display:
    """A bar for all runs, one for the epochs of each run in training, and one for the steps of the epoch."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=quiet or not self.console.is_terminal)
        self._runs = self.progress.add_task("runs", total=None)
        self._running: dict[str, TaskID] = {}
        self._steps = self.progress.add_task("", total=None, visible=False)
        self._totals: dict[str, int] = {}
        self._name, self._epochs, self._said = "", 0, 0.0
        self._jobs = ""

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self.progress.stop()

    def runs(self, done: int, total: int) -> None:
        self.progress.update(self._runs, completed=done, total=total)

    def jobs(self, states: str) -> None:
        """Show how many jobs of a cluster are in which state; in a pipe, a line when that changes."""
        if states != self._jobs:
            self._jobs = states
            self.progress.update(self._runs, description=f"runs ({states})" if states else "runs")
            if states and not self.console.is_terminal:
                self.say(f"jobs: {states}")

    def loading(self, what: str, done: int, total: int | None) -> None:
        """Show progress of reading data."""
        self.progress.update(self._steps, description=what, completed=done, total=total, visible=True)
        if done == total and not self.console.is_terminal:
            self.say(f"{what}: {done:,} done")

    def begin(self, name: str, epochs: int) -> None:
        """Show a run that is trained in this process."""
        self._name, self._epochs = name, epochs
        self.expect({name: epochs})
        self.show_epochs({name: 0})

    def expect(self, epochs: Mapping[str, int]) -> None:
        """Set the number of epochs of runs, by name."""
        self._totals.update(epochs)

    def show_epochs(self, epochs: Mapping[str, int]) -> None:
        """Show the runs in training, here or in other processes, and their last finished epochs."""
        for name in self._running.keys() - epochs.keys():
            self.progress.remove_task(self._running.pop(name))
        for name, epoch in epochs.items():
            if name not in self._running:
                self._running[name] = self.progress.add_task(name, total=self._totals.get(name))
            self.progress.update(self._running[name], completed=epoch)

    def step(self, epoch: int, step: int, of: int) -> None:
        self.progress.update(self._steps, description=f"epoch {epoch}", completed=step, total=of, visible=True)

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        self.show_epochs({self._name: record["epoch"]})
        last = record["epoch"] == self._epochs
        if not self.console.is_terminal and (last or time.monotonic() - self._said > PAUSE):
            self._said = time.monotonic()
            self.say(f"{self._name}: epoch {record['epoch']}/{self._epochs}{_metrics(record)}, {seconds:.1f} s")

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


def _metrics(record: dict[str, Any]) -> str:
    """Return the metrics of an epoch as text: train accuracy 0.93, test loss 0.2, …"""
    found = [
        f"{part} {metric_named(name).label} {'NaN' if value is None else f'{value:.4g}'}"
        for part in ("train", "test")
        for name, value in record[part].items()
    ]
    if record.get("columns"):
        found.append(f"columns within 0.1 of 1: {record['columns']['within_0.1']:.0%}")
    return "".join(f", {each}" for each in found)
