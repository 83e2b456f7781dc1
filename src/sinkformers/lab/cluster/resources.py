"""What one job asks of a cluster: processors, GPUs and time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sinkformers.lab.artefacts.artefact import ExperimentError

# Slurm's notations, of which 4:00 is four minutes.
TIME = re.compile(
    r"(?P<m>\d{1,7})(:(?P<s>\d{1,2}))?"  # 30, 30:00
    r"|(?P<h>\d{1,5}):(?P<hm>\d{1,2}):(?P<hs>\d{1,2})"  # 4:00:00
    r"|(?P<d>\d{1,3})-(?P<dh>\d{1,3})(:(?P<dm>\d{1,2})(:(?P<ds>\d{1,2}))?)?",  # 2-0, 2-12:00, 2-12:00:00
    re.ASCII,
)
SECONDS = {"m": 60, "s": 1, "h": 3600, "hm": 60, "hs": 1, "d": 86400, "dh": 3600, "dm": 60, "ds": 1}
LONGEST = 365 * 24 * 60  # minutes
WARNING = 120  # seconds before the time limit at which a job is told to save


@dataclass(frozen=True)
class Resources:
    """What the job of one run asks for."""

    minutes: int  # the time limit; a run that needs longer continues in the same job, which is queued again
    gpus: int = 0
    cpus: int = 1  # of each process
    processes: int = 1
    partition: str | None = None

    @property
    def warning(self) -> int:
        """Seconds before the time limit at which the job is told to save and to queue again."""
        return min(WARNING, 20 * self.minutes)

    def __str__(self) -> str:
        parts = [
            f"{self.processes} processes" if self.processes > 1 else "",
            _counted(self.cpus * self.processes, "CPU"),
            _counted(self.gpus, "GPU") if self.gpus else "",
            f"{duration(self.minutes)} at a time" if self.minutes < LONGEST else "",
            f"partition {self.partition}" if self.partition else "",
        ]
        return ", ".join(filter(None, parts))


def minutes(text: str) -> int:
    """Return a time limit, in a notation of Slurm, as whole minutes, rounded up."""
    match = TIME.fullmatch(text.strip())
    seconds = sum(int(number or 0) * SECONDS[unit] for unit, number in match.groupdict().items()) if match else 0
    if not 0 < seconds <= 60 * LONGEST:
        raise ExperimentError(
            "--time must be minutes, hours:minutes:seconds or days-hours, such as 30, 4:00:00 or 2-0, "
            f"and a year at most; got {text[:60]!r}."
        )
    return -(-seconds // 60)


def duration(minutes: int) -> str:
    """Return a number of minutes as text: 4 h, 1 h 30 min, 20 min."""
    hours, rest = divmod(minutes, 60)
    return " ".join(filter(None, [f"{hours} h" if hours else "", f"{rest} min" if rest else ""]))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
