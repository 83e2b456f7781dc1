"""Old import paths: they work for one version, and warn with the new path."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def warn_moved(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that `old` is now `new`."""
    warnings.warn(
        f"{old} has moved to {new}; the old path will be removed in the next version.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def names_of(old: str, new: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` for the module `old` that looks names up in the module `new`."""

    def get(name: str) -> Any:
        if name.startswith("__") or not hasattr(import_module(new), name):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warn_moved(f"{old}.{name}", f"{new}.{name}")
        return getattr(import_module(new), name)

    return get


def modules_of(old: str, *packages: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` for the package `old` that looks submodules up in the new `packages`, in order."""

    def get(name: str) -> Any:
        found = None if name.startswith("__") else next((p for p in packages if find_spec(f"{p}.{name}")), None)
        if found is None:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warn_moved(f"{old}.{name}", f"{found}.{name}")
        return import_module(f"{found}.{name}")

    return get
