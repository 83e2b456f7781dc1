"""How a run ends early: on Ctrl-C, on SIGTERM, or because the process that started it has ended.

Between two steps a training can leave a checkpoint, and within one it cannot. So the first signal is remembered while
steps are taken (`Stopping.deferred`), and the loop looks for it after each of them. Where nothing would be lost, as
while data is read, it raises `Stopped` at once. So does a second signal, wherever it comes.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal signals every process of a group, and a launcher passes on what it receives: within so many seconds, the
# two are one.
SAME = 0.5
MOMENT = 1.0  # seconds
FINISHED = "What is finished is kept, and the same command does the rest."


class Stopped(KeyboardInterrupt):
    """The process was asked to end by the signal `number`; `what_next` says what the same command will do."""

    def __init__(self, number: int, what_next: str = FINISHED) -> None:
        super().__init__(what_next)
        self.number, self.what_next = number, what_next
        self.saved = ""  # where the training stands, if a checkpoint was left because of the signal

    @property
    def code(self) -> int:
        """The exit code that shells give for this signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


class Stopping:
    """As a context, it receives SIGINT and SIGTERM. Signals that the process was started to ignore stay ignored.

    `parent` returns, called in a thread, when the process that started this one has ended: then this one receives
    SIGTERM.
    """

    def __init__(self, *, parent: Callable[[], None] | None = None, notice: Callable[[], None] = lambda: None) -> None:
        """`notice` is called, in a thread, where a signal has to wait for longer than a moment."""
        self.number: int | None = None  # of the first signal
        self._parent, self._notice = parent, notice
        self._deferred = False
        self._since = 0.0
        self._over = threading.Event()
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
            # Not a thread of the handler: the signal may have come while a lock is held that starting one needs.
            threading.Thread(target=self._remind, daemon=True).start()
            if self._parent is not None:
                threading.Thread(target=self._watch, args=(self._parent,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        for number, before in self._before.items():
            signal.signal(number, before)  # pyright: ignore[reportArgumentType]
        self._before = {}
        self._over.set()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Remember the first signal within the block instead of raising; what comes after the block looks for it."""
        with self._set(True):
            yield

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Raise within the block, which a deferred one holds: for work that can be repeated."""
        with self._set(False):
            self.check()
            yield

    def check(self) -> None:
        """Raise if a signal was remembered."""
        if self.number is not None:
            raise Stopped(self.number)

    @contextmanager
    def _set(self, deferred: bool) -> Iterator[None]:
        before, self._deferred = self._deferred, deferred
        try:
            yield
        finally:
            self._deferred = before

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._since = number, time.monotonic()
            if not self._deferred:
                raise Stopped(number)
        elif time.monotonic() - self._since > SAME:
            for each in self._before:
                signal.signal(each, signal.SIG_DFL)  # a third ends the process, whatever it is doing
            raise Stopped(number)

    def _remind(self) -> None:
        while not self._over.wait(MOMENT / 2):
            if self.number is not None and time.monotonic() - self._since > MOMENT:
                self._notice()
                return

    def _watch(self, parent: Callable[[], None]) -> None:
        parent()
        if self.number is None:
            _thread.interrupt_main(signal.SIGTERM)


def end_of_pipe(side: int) -> None:
    """Return when the process at the other side of a pipe has closed it, or has ended, by SIGKILL too."""
    # Not by sys.stdin: a thread that waits in its lock aborts the interpreter when it ends.
    while os.read(side, 1):
        pass


def end_of_launcher(pid: int) -> None:
    """Return when the parent of this process is no longer `pid`."""
    while os.getppid() == pid:
        time.sleep(MOMENT)
