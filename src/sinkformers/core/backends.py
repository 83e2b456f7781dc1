"""Which backend serves a call, and why one cannot: the one place that imports kernels, once they are wanted."""

import os
from importlib.util import find_spec
from types import ModuleType

import torch

from sinkformers.core import checks

NAMES = ("auto", "reference", "torch", "native", "triton")


def native() -> ModuleType:
    """The compiled CPU kernels."""
    from sinkformers.kernels import native

    return native


def triton() -> ModuleType:
    """The Triton kernels, for GPUs."""
    from sinkformers.kernels import triton

    return triton


def release_workspace() -> None:
    """Give back the memory that the compiled CPU kernels keep between calls, about 64 MiB at most.

    The next call takes it again. Nothing happens where the kernels were not built or are at work in another thread.

    Examples:
        >>> import sinkformers
        >>> sinkformers.release_workspace()
    """
    native().release_workspace()


def choose(caller: str, backend: str, device: torch.device) -> str:
    """The name of the backend that serves: `auto` takes the fastest known to, a named one serves or says why not.

    `auto` leaves the Triton kernels alone for now: they are right in Triton's interpreter and compile for GPUs, but
    nobody has yet run them on one.
    """
    checks.one_of(caller, "backend", backend, NAMES)
    if backend == "auto":
        return "torch" if _unable("native", device) else "native"
    reason = _unable(backend, device)
    if reason:
        raise NotImplementedError(
            f'{caller}: backend="{backend}" cannot serve: {reason}. '
            'backend="torch" runs everywhere, and "auto" takes native where it was built for the device, else torch.'
        )
    return backend


def _unable(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot serve a device, or None."""
    if backend == "triton":
        if find_spec("triton") is None:
            return "triton is not installed; pip install '.[triton]' in your clone"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the Triton kernels are for GPUs, and the tensors are on the CPU"
        return None
    if backend == "native":
        if device.type not in ("cpu", "meta"):
            return f"the compiled kernels are for the CPU, and the tensors are on {device}"
        return native().missing()
    return None
