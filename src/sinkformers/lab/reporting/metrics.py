"""The metrics: one table with the name, label, unit and direction of each. All code that prints or ranks reads it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

DIVERGED = "diverged"  # printed instead of a value that is not finite


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity measured on the test set, and on the training set if the task measures it there.

    Args:
        name: key in the records.
        label: name in tables and figures.
        unit: `"%"` for shares, which are printed in per cent; `""` for numbers without a unit.
        higher_is_better: direction; `False` for losses.
        decimals: digits after the point; `None` for four significant digits.
        paper_decimals: digits after the point for the paper's numbers, if they differ.
        has_curve: whether the figure of learning curves shows it.
    """

    name: str
    label: str
    unit: str = ""
    higher_is_better: bool = True
    decimals: int | None = None
    paper_decimals: int | None = None
    has_curve: bool = True

    @property
    def sign(self) -> int:
        """Return 1 if higher is better and −1 if lower is better, so that `sign * value` always grows with quality."""
        return 1 if self.higher_is_better else -1

    def text(self, value: float) -> str:
        """Return `value` as it is printed, such as `93.76%`."""
        return self._printed(value, self.decimals)

    def paper_text(self, value: float) -> str:
        """Return a value that the paper states, with as many digits as the paper has."""
        return self._printed(value, self.decimals if self.paper_decimals is None else self.paper_decimals)

    def best(self, values: Iterable[float]) -> float:
        return max(values, key=lambda value: self.sign * value)

    def worst(self, values: Iterable[float]) -> float:
        return min(values, key=lambda value: self.sign * value)

    def is_better(self, value: float, than: float) -> bool:
        return self.sign * value > self.sign * than

    def ranked(self, values: Iterable[float]) -> list[float]:
        """Replace values that are not finite, of runs that diverged, by the worst possible value."""
        return [value if math.isfinite(value) else -self.sign * math.inf for value in values]

    def _printed(self, value: float, decimals: int | None) -> str:
        if not math.isfinite(value):
            return DIVERGED
        if decimals is None:
            return f"{value:.4g}"
        return f"{value:.{decimals}%}" if self.unit == "%" else f"{value:.{decimals}f}"


# In the order of the learning curves.
METRICS = {
    metric.name: metric
    for metric in (
        Metric(name="loss", label="loss", higher_is_better=False),
        Metric(name="accuracy", label="accuracy", unit="%", decimals=2, paper_decimals=1),
        Metric(name="bleu", label="BLEU", decimals=2),
        Metric(name="bleu_tokenised", label="tokenised BLEU", decimals=2),
        Metric(name="perplexity", label="perplexity", higher_is_better=False),
        Metric(name="bits_per_byte", label="bits per byte", higher_is_better=False, decimals=3),
        Metric(name="error", label="error", higher_is_better=False),
        Metric(name="nll", label="negative log-likelihood", higher_is_better=False, has_curve=False),
    )
}


def metric_named(name: str) -> Metric:
    """Return the metric called `name`. Records may hold others: those print as they are, and higher is better."""
    return METRICS.get(name) or Metric(name=name, label=name)
