"""JSON of records, logs and checkpoints. The limit is `"n_iters": "inf"`, since JSON has no infinity.

>>> dumps({"settings": {"n_iters": math.inf}})
'{"settings": {"n_iters": "inf"}}'
>>> loads('{"settings": {"n_iters": "inf"}}')
{'settings': {'n_iters': inf}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

COUNT = "n_iters"
LIMIT = "inf"


def dumps(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return a record as JSON. `n_iters` may be `math.inf` at any depth.

    Raises:
        ValueError: if any other number is infinite or NaN.
    """
    return json.dumps(_without_infinity(value), indent=indent, sort_keys=sort_keys, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Return what `dumps` was given, with lists for tuples."""
    return json.loads(text, object_hook=_with_infinity)


def as_read(value: Any) -> Any:
    """Return a record as it is after writing and reading, to compare it with one that was read."""
    return loads(dumps(value))


def _without_infinity(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: LIMIT if name == COUNT and each == math.inf else _without_infinity(each)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_infinity(each) for each in value]
    return value


def _with_infinity(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, COUNT: math.inf} if value.get(COUNT) == LIMIT else value
