"""Early stopping of the process: on Ctrl-C, on SIGTERM, or because the process that started it has ended.

A training can save a checkpoint between two steps, but not within one. So the first signal is only remembered during
training (`Stopping.deferred`), and the loop checks for it after each step. Where nothing would be lost, as while data
is read, the signal raises `Stopped` at once. A second signal always does.
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

# Set for a process that another one watches: it writes no report, and stops when its standard input ends.
WORKER = "SINKFORMERS_WORKER"
SILENT, WITH_LOG = "silent", "with-log"  # its values: whether the process prints progress

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal signals every process of a group, and a launcher forwards signals: two within so many seconds count as one.
SAME_SIGNAL = 0.5
MOMENT = 1.0  # seconds until the user is told that a signal is waiting
FINISHED = "What is finished is kept, and the same command does the rest."


class Stopped(KeyboardInterrupt):
    """The process received the signal `number`; `what_next` says what the same command will do."""

    def __init__(self, number: int, what_next: str = FINISHED) -> None:
        super().__init__(what_next)
        self.number, self.what_next = number, what_next
        self.saved = ""  # position of the training, if a checkpoint was saved because of the signal

    @property
    def code(self) -> int:
        """The exit code of shells for this signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


class Stopping:
    """A context that handles SIGINT and SIGTERM. Signals that are ignored on entry stay ignored.

    Args:
        parent: called in a thread; when it returns, the process that started this one has ended, and this one receives
            SIGTERM.
        notice: called in a thread when a signal has to wait for longer than a moment.
    """

    def __init__(self, *, parent: Callable[[], None] | None = None, notice: Callable[[], None] = lambda: None) -> None:
        self.number: int | None = None  # of the first signal
        self._parent, self._notice = parent, notice
        self._deferred = False
        self._since = 0.0
        self._over = threading.Event()
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
            # Not started in the handler: a signal may interrupt code that holds a lock needed to start threads.
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
        """Only remember the first signal within the block; the caller checks for it later."""
        with self._set(True):
            yield

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Raise at once within this block, inside a deferred one: for work that can be repeated."""
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
        elif time.monotonic() - self._since > SAME_SIGNAL:
            for each in self._before:
                signal.signal(each, signal.SIG_DFL)  # a third signal ends the process at once
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


@contextmanager
def blocked(*numbers: int) -> Iterator[None]:
    """Hold signals back until the end of the block. Processes that are started within it never receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_of_pipe(side: int) -> None:
    """Return when the process at the other end of a pipe has closed it or has ended, even by SIGKILL."""
    # Not sys.stdin: a thread that waits for its lock aborts the interpreter at exit.
    while os.read(side, 1):
        pass


def end_of_launcher(pid: int) -> None:
    """Return when the parent of this process is no longer `pid`."""
    while os.getppid() == pid:
        time.sleep(MOMENT)
