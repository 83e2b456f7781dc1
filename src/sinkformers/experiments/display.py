"""What a run shows while it works: bars in a terminal, a line an epoch in a pipe."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """One bar for the cells, one for the epochs of the cell that runs, one for the steps of its epoch."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=quiet or not self.console.is_terminal)
        self._cells = self.progress.add_task("cells", total=None)
        self._epochs = self.progress.add_task("epochs", total=None, visible=False)
        self._steps = self.progress.add_task("steps", total=None, visible=False)

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self.progress.stop()

    def cells(self, done: int, total: int) -> None:
        self.progress.update(self._cells, completed=done, total=total)

    def begin(self, name: str, epochs: int) -> None:
        self.name, self.total = name, epochs
        self.progress.reset(self._epochs, total=epochs, description=name, visible=True)

    def step(self, epoch: int, step: int, of: int) -> None:
        self.progress.update(
            self._steps, description=f"epoch {epoch}", completed=step, total=of, visible=self.total > 0
        )

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        self.progress.update(self._epochs, completed=record["epoch"])
        if not self.console.is_terminal:
            self.say(f"{self.name}: epoch {record['epoch']}/{self.total}{_figures(record)}, {seconds:.1f} s")

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


def _figures(record: dict[str, Any]) -> str:
    """The measures of an epoch: train accuracy 0.93, test loss 0.2, …"""
    found = [f"{part} {name} {value:.4g}" for part in ("train", "test") for name, value in record[part].items()]
    if record.get("columns"):
        found.append(f"columns within 0.1 of 1: {record['columns']['within_0.1']:.0%}")
    return "".join(f", {each}" for each in found)
