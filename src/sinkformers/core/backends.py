"""Which backend serves a call, and why one cannot: the one place that imports kernels, once they are wanted."""

from types import ModuleType

import torch

from sinkformers.core import checks

NAMES = ("auto", "reference", "torch", "native", "triton")


def native() -> ModuleType:
    """The compiled CPU kernels."""
    from sinkformers.kernels import native

    return native


def release_workspace() -> None:
    """Give back the memory that the compiled CPU kernels keep between calls, about 64 MiB at most.

    The next call takes it again. Nothing happens where the kernels were not built or are at work in another thread.

    Examples:
        >>> import sinkformers
        >>> sinkformers.release_workspace()
    """
    native().release_workspace()


def choose(caller: str, backend: str, device: torch.device) -> str:
    """The name of the backend that serves: `auto` takes the fastest that can, a named one serves or says why not."""
    checks.one_of(caller, "backend", backend, NAMES)
    if backend == "auto":
        return "torch" if _unable("native", device) else "native"
    reason = _unable(backend, device)
    if reason:
        raise NotImplementedError(
            f'{caller}: backend="{backend}" cannot serve: {reason}. '
            'backend="torch" runs everywhere, and "auto" chooses the fastest that can.'
        )
    return backend


def _unable(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot serve a device, or None."""
    if backend == "triton":
        return "the Triton kernels are still to come"
    if backend == "native":
        if device.type not in ("cpu", "meta"):
            return f"the compiled kernels are for the CPU, and the tensors are on {device}"
        return native().missing()
    return None
