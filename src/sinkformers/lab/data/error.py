"""What every function of this room raises where its user can do something about it."""

from __future__ import annotations


class DataError(Exception):
    """A data set is missing, damaged or out of reach; the message is one sentence: the file, and the remedy."""


def missing_library(library: str, what: str) -> DataError:
    """The error for a library that decoding `what` needs and that is not installed."""
    return DataError(f"{what} needs {library}; install it with pip install '.[experiments]' in your clone.")
