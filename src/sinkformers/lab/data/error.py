"""The error that every function of `sinkformers.lab.data` raises for a problem that its user can fix."""

from __future__ import annotations

from sinkformers.lab.error import LabError


class DataError(LabError):
    """A data set is missing, damaged or unreachable. The message is one sentence: the file, and how to fix it."""


def missing_library(library: str, purpose: str, extra: str = "experiments") -> DataError:
    """Return the error for a library that `purpose` needs and that is not installed; `extra` installs it."""
    return DataError(f"{purpose} needs {library}; install it with pip install '.[{extra}]' in your clone.")
