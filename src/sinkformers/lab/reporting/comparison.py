"""Arms that differ in n_iters and in nothing else: what may be set side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sinkformers.lab.artefacts.artefact import Record


@dataclass(frozen=True)
class Comparison:
    """Runs with equal `settings` (all but n_iters), by n_iters; the runs of a side are in the order of their seeds."""

    settings: Mapping[str, Any]
    sides: Mapping[int, list[Record]]

    @property
    def label(self) -> str:
        return describe(self.settings)


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """All runs, sorted into comparisons; settings in ascending order, n_iters too, what goes on with another's
    model at the end."""
    found: dict[str, Comparison] = {}
    for record in sorted(records, key=lambda record: (order(record), record.metrics["seed"])):
        settings = record.metrics["settings"]
        equal = found.setdefault(key(settings), Comparison(others(settings), {}))
        assert isinstance(equal.sides, dict)
        equal.sides.setdefault(settings["n_iters"], []).append(record)
    return list(found.values())


def others(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without n_iters."""
    return {name: value for name, value in settings.items() if name != "n_iters"}


def key(settings: Mapping[str, Any]) -> str:
    """Equal for arms that may be compared."""
    return json.dumps(others(settings), sort_keys=True)


def order(record: Record) -> tuple[bool, list[Any], int]:
    """Sorts arms by settings: numbers as numbers and before words, n_iters last, an arm with a further setting after
    its like. Arms that go on with another's model come after all that do not."""
    settings = record.metrics["settings"]
    return record.goes_on, [rank(value) for value in others(settings).values()], settings["n_iters"]


def rank(value: Any) -> tuple[bool, float, str]:
    """Sorts the values of one setting."""
    if isinstance(value, int | float):
        return False, value, ""
    return True, 0, value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def describe(settings: Mapping[str, Any]) -> str:
    """`{"patch": 7, "rate": 0.001}` in words: patch 7, rate 0.001."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def side(n_iters: int) -> str:
    """What one side of a comparison is called."""
    return "SoftMax" if n_iters == 1 else f"Sinkhorn, n_iters = {n_iters}"


def spoken(metric: str) -> str:
    """A metric as people write it."""
    return {"bleu": "BLEU", "bleu_tokenised": "tokenised BLEU"}.get(metric, metric)
