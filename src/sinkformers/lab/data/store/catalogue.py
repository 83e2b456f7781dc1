"""The catalogue of data sets: every module of `sinkformers.lab.data.sets` that defines `DATA_SET`."""

from __future__ import annotations

import difflib
from importlib import import_module
from pkgutil import iter_modules

from sinkformers.lab.data import sets
from sinkformers.lab.data.error import DataError
from sinkformers.lab.data.store.data_set import DataSet


def discover() -> dict[str, DataSet]:
    """Return the `DATA_SET` of each module in `sets`, by name. These modules do not import torch at the top."""
    modules = (import_module(f"{sets.__name__}.{info.name}") for info in iter_modules(sets.__path__))
    entries = [module.DATA_SET for module in modules if hasattr(module, "DATA_SET")]
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


CATALOGUE = discover()


def find_data_set(name: str) -> DataSet:
    """Return the entry called `name`, or raise an error that lists all names."""
    if isinstance(name, str) and name in CATALOGUE:
        return CATALOGUE[name]
    close = difflib.get_close_matches(str(name), CATALOGUE, n=1)
    suggestion = f"did you mean {close[0]}? " if close else ""
    raise DataError(f"there is no data set {name!r}; {suggestion}there are {', '.join(CATALOGUE)}.")
