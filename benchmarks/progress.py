"""What a run says while it runs: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.status import Status

from benchmarks.measurement import Measurement
from benchmarks.units import duration, size


class Progress:
    """`say` shows a status line, on a terminal only; `show` prints a result."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._status: Status | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with self.console.status("starting") as self._status:
            yield
        self._status = None

    def say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)

    def rounds(self, title: str) -> Callable[[int, int], None]:
        return lambda done, total: self.say(f"{title}: round {done} of {total}")

    def heading(self, text: str) -> None:
        self.console.print(text, style="bold", markup=False, soft_wrap=True)

    def show(self, measurement: Measurement) -> None:
        self.console.print(describe(measurement), markup=False, soft_wrap=True)


def describe(m: Measurement) -> str:
    """A measurement in one line."""
    name = " ".join(filter(None, [m.row, f"n_iters {m.n_iters}" if m.n_iters else "", m.variant]))
    head = f"{m.suite:<10} {m.shape:<12} {name:<34}"
    if m.reason:
        return f"{head} {m.status}: {m.reason}"
    parts = []
    if m.seconds:
        parts.append(
            f"{duration(m.seconds.median):>9} [{duration(m.seconds.first)}, {duration(m.seconds.third)}] "
            f"{m.seconds.count} rounds"
        )
    if m.ratio:
        parts.append(f"{m.ratio.median:.3f} × {m.baseline}")
    if m.peak_bytes is not None:
        parts.append(f"peak {size(m.peak_bytes)}")
    parts += [f"{name} {value:.4g}" for name, value in m.fit.items()]
    if m.curve:
        parts.append(f"curve of {len(m.curve)} points")
    return f"{head} {', '.join(parts)}"
