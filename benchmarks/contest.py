"""One contest: rows that are checked, timed together in interleaved rounds, and compared with one of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import agreement
from benchmarks.measurement import FAILED, LEFT_OUT, REFUSED, TIMED, Measurement
from benchmarks.progress import Progress
from benchmarks.steps import Step, Unavailable
from benchmarks.summary import paired_ratio, spread
from benchmarks.timing import Plan, interleave


@dataclass(frozen=True)
class Entry:
    """A row as it is timed: `build` makes its step (or says why not), `check` calls it once and compares."""

    row: str
    build: Callable[[], Step]
    check: Callable[[], agreement.Checked]
    settings: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    @property
    def key(self) -> str:
        return " ".join([self.row, *(f"{name}={value}" for name, value in sorted(self.settings.items()))])


def compete(
    suite: str, shape: str, entries: Iterable[Entry], plan: Plan, progress: Progress, *, baseline: str = "sdpa"
) -> list[Measurement]:
    """The entries' measurements, in order; all are divided by the first entry of the row `baseline`."""
    entries = list(entries)
    results: dict[str, Measurement] = {}
    steps: dict[str, Step] = {}
    known: dict[str, float] = {}
    for entry in entries:
        progress.say(f"{suite} {shape}: checking {entry.key}")
        results[entry.key], step, seconds = _admit(suite, shape, entry)
        if step is not None:
            steps[entry.key] = step
            if not entry.compiled:
                known[entry.key] = seconds
    yardstick = next((entry.key for entry in entries if entry.row == baseline and entry.key in steps), None)
    times = interleave(steps, plan, known=known, always=yardstick, on_round=progress.rounds(f"{suite} {shape}"))
    for key, by_round in times.items():
        ratio = paired_ratio(by_round, times[yardstick]) if yardstick else None
        seconds = spread(list(by_round.values()))
        results[key] = replace(results[key], seconds=seconds, ratio=ratio, baseline=baseline if yardstick else "")
    for measurement in results.values():
        progress.show(measurement)
    return list(results.values())


def _admit(suite: str, shape: str, entry: Entry) -> tuple[Measurement, Step | None, float]:
    """A row is timed only if it can serve and agrees; otherwise it stays, with its reason."""
    blank = Measurement(suite, shape, entry.row, LEFT_OUT, **entry.settings)
    try:
        off, seconds, tolerance, found = entry.check()
        if not off <= tolerance:
            reason = f"disagrees with float64 by {off:.1e} of the largest entry (at most {tolerance:.0e} is let in)"
            return replace(blank, status=REFUSED, reason=reason, deviation=off), None, seconds
        return replace(blank, status=TIMED, deviation=off, fit=dict(found)), entry.build(), seconds
    except (Unavailable, NotImplementedError) as refusal:
        return replace(blank, reason=str(refusal)), None, 0.0
    except Exception as error:  # one row's failure must not cost the others their run
        return replace(blank, status=FAILED, reason=f"{type(error).__name__}: {_first_line(error)}"), None, 0.0


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
