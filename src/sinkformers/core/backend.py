"""Backends: objects that compute an operator, in one table per operator.

A table is asked in order: `auto` takes the first backend that serves a call, and one that the user names serves or
raises its reason not to. Where a backend asks for it, `auto` takes it after a self-check only.
"""

import sys
import warnings
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from sinkformers.core import checks
from sinkformers.core.description import shape_of
from sinkformers.core.modes import readable
from sinkformers.core.self_check import SelfChecks


class Backend:
    """One way to compute an operator. Subclass it, and add an instance to the operator's table."""

    name: str
    composite = False  # whether `forward` consists of torch's own operations and is differentiated by autograd

    def why_not(self, call: Any) -> str | None:
        """The reason why this backend cannot serve a call, or None where it can."""
        raise NotImplementedError

    def automatic(self, call: Any) -> bool:
        """Whether `auto` may take this backend for a call that it can serve."""
        return True

    def kind(self, call: Any) -> Hashable:
        """What chooses the code that serves a call: `auto` checks one call of each kind; see `core.self_check`.

        None where the code needs no check.
        """
        return None

    def forward(self, call: Any) -> Any:
        """The operator's result. A composite backend returns the output alone, in the dtype of the inputs."""
        raise NotImplementedError

    def backward(self, call: Any, result: Any, d_output: Tensor, needed: dict[str, bool]) -> dict[str, Tensor | None]:
        """The gradients by field. They may be larger than the field where that was broadcast.

        `result` is what `forward` returned. Fields that are marked as not saved are None, in the call as in the result.
        Gradients that are not needed may be left out.
        """
        raise NotImplementedError

    def forward_eager(self, call: Any) -> Any:
        """The result of an eager call that nothing intercepts, whose state may have another form, with fields of None.

        Then `backward` takes both forms, and `described` turns the second into the first.
        """
        return self.forward(call)

    def described(self, call: Any, result: Any) -> Any:
        """A result of `forward_eager` with the state in the form of `forward`, which is what the operator describes."""
        return result

    def choices(self, call: Any) -> tuple[str, ...]:
        """The names of ways to compute such a call that differ in speed alone; none where there is only one."""
        return ()

    def prefer(self, call: Any, choice: str) -> None:
        """Compute calls of this shape in one of the `choices`, from now on, in this process."""
        raise NotImplementedError

    def warning(self, call: Any) -> str | None:
        """What to warn of, once per process, where `auto` passes over this backend; None for nothing."""
        return None

    def rows_per_block(self, call: Any) -> int:
        """How many rows are taken at a time, for operators that save something per block of rows."""
        raise NotImplementedError

    def traced(self, call: Any) -> "Backend | None":
        """What compiled graphs hold of this backend instead of the operator, or None for the operator itself."""
        return None

    def revision(self) -> str:
        """What distinguishes this version from others in graphs that torch keeps on disk."""
        from sinkformers.core.revision import REVISION

        return REVISION


class Declined(Backend):
    """A backend that other operators have, and this one has not, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def automatic(self, call: Any) -> bool:
        return False

    def why_not(self, call: Any) -> str | None:
        return self.reason


class Backends:
    """The backends of one operator, in the order in which `auto` asks them."""

    def __init__(self, *backends: Backend) -> None:
        self.by_name = {backend.name: backend for backend in backends}
        self.checks = SelfChecks()
        self.winners: dict[tuple[Any, ...], str] = {}  # by shape: what `tune` found to be the fastest

    def __getitem__(self, name: str) -> Backend:
        return self.by_name[name]

    def names(self) -> tuple[str, ...]:
        return ("auto", *self.by_name)

    def choose(self, caller: str, name: str, call: Any) -> Backend:
        """The backend that serves a call: the named one, or for `auto` the first that can."""
        if name != "auto":
            checks.one_of(caller, "backend", name, self.names())
            backend = self.by_name[name]
            reason = backend.why_not(call)
            if reason is None:
                return backend
            raise NotImplementedError(
                f'{caller}: backend="{name}" cannot serve this call: {reason}. '
                'backend="torch" serves all calls, and "auto" takes the fastest backend that can.'
            )
        if self.winners and readable(call[0]):  # eager calls were timed, and sizes may be symbols in traced ones
            winner = self.winners.get(shape_of(call))
            if winner is not None and self.by_name[winner].why_not(call) is None:
                return self.by_name[winner]
        for backend in self.by_name.values():
            if backend.automatic(call):
                if backend.why_not(call) is None and self.trusts(backend, call):
                    return backend
                _warn_once(backend.warning(call))
        raise NotImplementedError(f"{caller}: no backend serves this call.")

    def trusts(self, backend: Backend, call: Any) -> bool:
        """Whether a backend needs no check, or is known to agree with torch on calls of this kind, on this device."""
        kind = backend.kind(call)
        if kind is None:
            return True
        verdict = self.checks.verdict(backend, self.by_name["torch"], call, kind)
        if verdict is None:
            return False
        _warn_once(verdict.warning)
        return verdict.agrees


_WARNED: set[str] = set()


def _warn_once(message: str | None) -> None:
    if message is not None and message not in _WARNED and not torch.compiler.is_compiling():
        _WARNED.add(message)
        warnings.warn(f"sinkformers: {message}", RuntimeWarning, stacklevel=level_of_the_caller())


def level_of_the_caller() -> int:
    """The `stacklevel`, counted from the function that warns, of the first function outside this package."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "sinkformers":
        frame, level = frame.f_back, level + 1
    return level


def workspace_limit() -> int:
    """The bytes of exponentiated scores that the compiled CPU kernels may keep; see `set_workspace_limit`.

    Examples:
        >>> import sinkformers
        >>> sinkformers.workspace_limit() // 2**20
        64
    """
    from sinkformers.kernels import native

    return native.workspace_limit()


def set_workspace_limit(size: int | None) -> None:
    """Set how many bytes of exponentiated scores the compiled CPU kernels may keep, in all threads together.

    Rows of scores beyond the limit are computed again in each pass, which saves memory and takes time: results agree up
    to rounding. A head of n queries and m keys is stored as a whole in 4·n·m bytes (float32), so beyond n = 4096 more
    than the default of 64 MiB makes calls faster. The limit holds for the whole process, from the next call on.
    Vectors, and a few rows per thread, are not counted.

    Args:
        size: the limit in bytes, 0 for no stored rows, None for the default.

    Examples:
        >>> import sinkformers
        >>> sinkformers.set_workspace_limit(2**30)
        >>> sinkformers.workspace_limit() == 2**30
        True
        >>> sinkformers.set_workspace_limit(None)
    """
    from sinkformers.kernels import native

    limit = native.DEFAULT_WORKSPACE if size is None else checks.size("set_workspace_limit", "size", size)
    native.set_workspace_limit(limit)
    native.release_workspace()  # what is kept may be larger


def release_workspace() -> None:
    """Free the memory that the compiled CPU kernels keep between calls: about `workspace_limit()` bytes at most.

    The next call allocates it again. Nothing happens where the kernels were not built or are running in another thread.

    Examples:
        >>> import sinkformers
        >>> sinkformers.release_workspace()
    """
    from sinkformers.kernels import native

    native.release_workspace()
