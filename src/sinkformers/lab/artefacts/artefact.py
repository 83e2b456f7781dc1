"""The parts of an experiment: an artefact has presets, a preset has arms, and an arm with a seed is a run.

A run is trained once and has a folder of its own. The arms of a preset differ only in their settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkformers.lab.error import LabError

if TYPE_CHECKING:
    from sinkformers.lab.workbench.task import Task

# The files of a run.
METRICS_FILE = "metrics.json"  # the record; a run that has it is finished
RUN_FILE = "run.json"  # versions, machine and times
MODEL_FILE = "model.safetensors"  # the trained weights
LOG_FILE = "log.jsonl"  # one line per epoch
JOB_LOG = "job.log"  # on a cluster: what the jobs of the run printed
JOB_FILE = "job.json"  # on a cluster, until the run is finished: the id of its job


class ExperimentError(LabError):
    """An error that the user can fix; the message says how."""


def retrain_hint(folder: Path) -> str:
    """Return the remedy for a finished run whose model cannot be used."""
    return f"If no other copy is there, delete the folder {folder} and train the run again."


@dataclass(frozen=True)
class Arm:
    """One side of a comparison. `settings` always holds `n_iters`: 1 is the Transformer, `math.inf` the limit."""

    name: str  # also the name of its folder
    settings: Mapping[str, Any]
    after: str | None = None  # arm whose trained model, of the same seed, this one starts from

    @property
    def n_iters(self) -> int | float:
        return self.settings["n_iters"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One scale at which an artefact is run."""

    about: str
    takes: str  # time and hardware, as text
    data: str = ""  # name of the data set; "" if no files are read
    seeds: tuple[int, ...] = ()
    arms: tuple[Arm, ...] = ()
    config: Any = None  # a dataclass of plain values, shared by all arms
    floor: float | None = None  # value that the SoftMax arms must reach before arms are compared
    metric: str | None = None  # if it differs from the artefact's


@dataclass(frozen=True)
class Run:
    """One training: an arm and a seed."""

    artefact: str
    preset: str
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """The folder of the run, relative to the output folder."""
        return Path(self.artefact, self.preset, self.arm.name, f"seed-{self.seed}")

    @property
    def before(self) -> Path | None:
        """The folder of the run that this one continues, which must be finished first; None if there is none."""
        return None if self.arm.after is None else self.folder.parents[1] / self.arm.after / self.folder.name


@dataclass(frozen=True)
class Record:
    """A finished run as read from `metrics.json` and `run.json` in its folder."""

    metrics: Mapping[str, Any]
    run: Mapping[str, Any]
    folder: Path | None = None

    @property
    def is_continued(self) -> bool:
        """Whether it started from the trained model of another run."""
        return bool(self.metrics.get("after"))

    @property
    def final(self) -> Mapping[str, Any]:
        """The last epoch."""
        return self.metrics["epochs"][-1]


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A figure or a table of the paper, or an experiment that it does not have."""

    name: str
    title: str
    paper: str  # the paper's result, as text
    metric: str = "accuracy"  # of epochs[…]["test"]
    presets: Mapping[str, Preset] = field(default_factory=dict)
    paper_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # arm → {"median": …, "best": …}
    task: Callable[[Preset, Arm, int, Path | None], Task] | None = None
    identical_runs_in: tuple[str, ...] = ()  # artefacts that share some runs with this one
    equal_time: bool = False  # whether arms are also compared after equal seconds of training
    make: Callable[[Preset, Path], str] | None = None  # if nothing is trained: writes to a folder, returns text

    def metric_of(self, preset: str) -> str:
        """Return the name of the metric by which the runs of a preset are compared."""
        return (preset in self.presets and self.presets[preset].metric) or self.metric
