"""Which backend serves a call, and why one cannot."""

from sinkformers.core import checks

NAMES = ("auto", "reference", "torch", "native", "triton")

_MISSING = {
    "native": "the compiled CPU kernels are still to come",
    "triton": "the Triton kernels are still to come",
}


def choose(caller: str, backend: str) -> str:
    """The name of the backend that serves: `auto` takes the fastest that can, a named one serves or says why not."""
    checks.one_of(caller, "backend", backend, NAMES)
    if backend in _MISSING:
        raise NotImplementedError(
            f'{caller}: backend="{backend}" cannot serve: {_MISSING[backend]}. '
            'backend="torch" runs everywhere, and "auto" chooses it.'
        )
    return "torch" if backend == "auto" else backend
