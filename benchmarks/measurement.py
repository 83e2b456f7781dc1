"""One line of a record: a row, what it was asked to do, and what came of it."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from benchmarks.summary import Spread

TIMED, MEASURED, FITTED = "timed", "measured", "fitted"
LEFT_OUT, REFUSED, FAILED = "left out", "refused", "failed"
INFINITE = "inf"


@dataclass(frozen=True)
class Measurement:
    suite: str
    shape: str
    row: str
    status: str
    n_iters: int | float | None = None
    variant: str = ""
    reason: str = ""
    n: int | None = None
    seconds: Spread | None = None
    baseline: str = ""
    ratio: Spread | None = None
    deviation: float | None = None
    peak_bytes: int | None = None
    fit: dict[str, float] = field(default_factory=dict)
    curve: tuple[tuple[float, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what there is; an infinite `n_iters`, for which JSON has no number, as text."""
        found = {name: value for name, value in asdict(self).items() if value not in (None, "", {}, ())}
        return found | ({"n_iters": INFINITE} if self.n_iters == math.inf else {})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Measurement":
        known = {name: data[name] for name in (f.name for f in fields(cls)) if name in data}
        for name in ("seconds", "ratio"):
            if name in known:
                known[name] = Spread(**known[name])
        if known.get("n_iters") == INFINITE:
            known["n_iters"] = math.inf
        if "curve" in known:
            known["curve"] = tuple((x, y) for x, y in known["curve"])
        return cls(**known)
