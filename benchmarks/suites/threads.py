"""One thread against two, for many heads and for a single one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.contest import compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.steps import Step
from benchmarks.suites.entries import attention_entry

ROWS = ("sdpa", "native")
CASES = (Case(2, 8, 512, n_iters=5), Case(1, 1, 1024, n_iters=5))
THREADS = {"": 2, "1 thread": 1}
SECONDS = 15.0


class ThreadedStep:
    """A step on a number of threads of its own, which is set before its time begins."""

    def __init__(self, step: Step, threads: int) -> None:
        self.step, self.threads = step, threads

    def reset(self) -> None:
        torch.set_num_threads(self.threads)
        self.step.reset()

    def call(self) -> None:
        self.step.call()

    def outcome(self) -> Sequence[Tensor]:
        return self.step.outcome()


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for case in CASES:
        entries = [
            attention_entry(on_threads(row, threads), case, variant)
            for variant, threads in THREADS.items()
            for row in settings.pick(ROWS)
        ]
        try:
            found = compete("threads", case.label, entries, settings.plan(SECONDS), progress)
        finally:
            torch.set_num_threads(settings.threads)
        yield from found


def on_threads(row: Row, threads: int) -> Row:
    """Return the row whose steps run on `threads` threads."""
    return replace(row, prepare_step=lambda inputs: ThreadedStep(row.prepare_step(inputs), threads))
