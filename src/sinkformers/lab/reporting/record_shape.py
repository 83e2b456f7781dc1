"""The expected structure of records, as far as reports read them. Files are not trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any


@dataclass(frozen=True)
class Object:
    """A JSON object: `known` entries have these shapes if present, all others the shape `entries`."""

    known: Mapping[str, Any] = field(default_factory=dict)
    entries: Any = None
    needed: tuple[str, ...] = ()


@dataclass(frozen=True)
class List:
    items: Any
    at_least: int = 0


NUMBER, WHOLE, TEXT = "a number", "a whole number", "a string"
COUNT = 'a whole number or "inf"'  # read as math.inf
MEASURE = "a number or null"  # JSON has no NaN: null means NaN
LARGEST = 1e308
MEASURES = Object(entries=MEASURE)
COLUMNS = Object({"quantiles": List(MEASURE)}, entries=MEASURE)
LAYER = Object({"name": TEXT}, entries=MEASURE)
EPOCH = Object(
    {"epoch": WHOLE, "rate": NUMBER, "train": MEASURES, "test": MEASURES, "columns": COLUMNS, "layers": List(LAYER)}
)
NAMES = ("artefact", "preset", "arm", "metric")
METRICS = Object(
    {
        **dict.fromkeys(NAMES, TEXT),
        "seed": WHOLE,
        "settings": Object({"n_iters": COUNT}, needed=("n_iters",)),
        "config": Object(),
        "data": Object({"signatures": Object(entries=TEXT)}),
        "epochs": List(EPOCH, at_least=1),
    },
    needed=(*NAMES, "seed", "settings", "epochs"),
)
RUN = Object({"seconds_per_epoch": List(NUMBER)})


def fault(value: Any, shape: Any, where: str = "") -> str | None:
    """Return how a value differs from its shape, in a few words; None if it does not. Entries that are not needed may
    be null."""
    if isinstance(shape, Object):
        return _fault_of_object(value, shape, where)
    if isinstance(shape, List):
        if not isinstance(value, list) or len(value) < shape.at_least:
            least = f" of {shape.at_least} or more" if shape.at_least else ""
            return f"{where} must be a list{least}, got {_short(value)}"
        found = (fault(each, shape.items, f"{where}[{place}]") for place, each in enumerate(value))
        return next(filter(None, found), None)
    if shape == COUNT and value == math.inf:
        return None
    kinds = {NUMBER: (int, float), MEASURE: (int, float, NoneType), WHOLE: (int,), COUNT: (int,), TEXT: (str,)}[shape]
    if isinstance(value, kinds) and not isinstance(value, bool) and not _is_huge(value):
        return None
    return f"{where} must be {shape}, got {_short(value)}"


def _fault_of_object(value: Any, shape: Object, where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where or 'it'} must be an object, got {_short(value)}"
    for name in shape.needed:
        if value.get(name) is None:
            return f"{_below(where, name)} is missing"
    for name, each in value.items():
        expected = shape.known.get(name, shape.entries)
        if expected is not None and not (each is None and name not in shape.needed):
            found = fault(each, expected, _below(where, name))
            if found:
                return found
    return None


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _is_huge(value: Any) -> bool:
    """Whether an integer is too large for a float, and too long for Python to print."""
    return isinstance(value, int) and abs(value) > LARGEST


def _short(value: Any) -> str:
    text = f"more than {LARGEST:g}" if _is_huge(value) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
