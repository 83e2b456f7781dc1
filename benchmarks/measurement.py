"""One line of a record: a row, what it was asked to do, and what came of it."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from benchmarks.summary import Spread

TIMED, MEASURED, FITTED = "timed", "measured", "fitted"
LEFT_OUT, REFUSED, FAILED = "left out", "refused", "failed"


@dataclass(frozen=True)
class Measurement:
    suite: str
    shape: str
    row: str
    status: str
    n_iters: int | None = None
    variant: str = ""
    reason: str = ""
    n: int | None = None
    seconds: Spread | None = None
    baseline: str = ""
    ratio: Spread | None = None
    deviation: float | None = None
    peak_bytes: int | None = None
    fit: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "", {})}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Measurement":
        known = {name: data[name] for name in (f.name for f in fields(cls)) if name in data}
        for name in ("seconds", "ratio"):
            if name in known:
                known[name] = Spread(**known[name])
        return cls(**known)
