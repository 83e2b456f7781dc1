"""Arms that differ only in n_iters, which can be compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sinkformers.lab.artefacts.artefact import Record
from sinkformers.lab.reporting import labels

OF_COLUMN_STEPS = ("tau", "causal")  # settings without an effect on SoftMax, which has no column steps


@dataclass(frozen=True)
class Comparison:
    """Runs with equal `settings` (all but n_iters), by n_iters; the runs of a side are in the order of their seeds."""

    settings: Mapping[str, Any]
    sides: Mapping[int | float, list[Record]]

    @property
    def label(self) -> str:
        return describe(self.settings)


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """Group all runs into comparisons, sorted by settings and n_iters; runs from trained models come last."""
    found: dict[str, Comparison] = {}
    for record in sorted(records, key=lambda record: (order(record), record.metrics["seed"])):
        settings = record.metrics["settings"]
        equal = found.setdefault(key(settings), Comparison(others(settings), {}))
        assert isinstance(equal.sides, dict)
        equal.sides.setdefault(settings["n_iters"], []).append(record)
    return list(found.values())


def with_softmax(found: Iterable[Comparison]) -> list[Comparison]:
    """Add to comparisons without a SoftMax side that of the comparison which differs in column steps only."""
    found = list(found)
    softmax = {softmax_key(each.settings): each.sides[1] for each in found if 1 in each.sides}
    return [
        each
        if 1 in each.sides or softmax_key(each.settings) not in softmax
        else Comparison(each.settings, {1: softmax[softmax_key(each.settings)], **each.sides})
        for each in found
    ]


def others(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without n_iters."""
    return {name: value for name, value in settings.items() if name != "n_iters"}


def key(settings: Mapping[str, Any]) -> str:
    """Return a key that is equal for arms that can be compared."""
    return json.dumps(others(settings), sort_keys=True)


def softmax_key(settings: Mapping[str, Any]) -> str:
    """Return a key that is equal for an arm and the SoftMax arm that it is compared with."""
    return key({name: value for name, value in settings.items() if name not in OF_COLUMN_STEPS})


def order(record: Record) -> tuple[bool, list[Any], int | float]:
    """Return a sort key for arms: by settings, with numbers before strings, then by n_iters. An arm with one more
    setting comes after the arm without it. Arms that start from a trained model come last."""
    settings = record.metrics["settings"]
    return record.is_continued, [rank(value) for value in others(settings).values()], settings["n_iters"]


def rank(value: Any) -> tuple[bool, float, str]:
    """Return a sort key for the values of one setting."""
    if isinstance(value, int | float):
        return False, value, ""
    return True, 0, value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def describe(settings: Mapping[str, Any]) -> str:
    """Return settings as text: `{"patch": 7, "rate": 0.001}` becomes `patches of 7, rate 0.001`."""
    return ", ".join(filter(None, (labels.setting(name, value) for name, value in settings.items())))


def side(n_iters: int | float) -> str:
    """Return the label of one side of a comparison."""
    return "SoftMax" if n_iters == 1 else f"Sinkhorn, n_iters = {count_text(n_iters)}"


def count_text(n_iters: Any) -> str:
    """Return a number of iterations as text; the limit is ∞."""
    return "∞" if n_iters == math.inf else str(n_iters)
