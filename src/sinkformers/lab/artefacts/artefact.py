"""What an experiment is made of: an artefact has presets, a preset has arms, and an arm and a seed are a run.

A run is trained once and kept in a folder of its own. The arms of a preset differ in what `Arm.settings` says, and in
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkformers.lab.workbench.task import Task

# The files of a run.
METRICS_FILE = "metrics.json"  # its record; with it a run is finished
RUN_FILE = "run.json"  # what made the record
MODEL_FILE = "model.safetensors"  # the trained weights
LOG_FILE = "log.jsonl"  # a line an epoch


class ExperimentError(Exception):
    """Something its user can change; the message says what, and how."""


def retrain_hint(folder: Path) -> str:
    """What helps where the model of a finished run cannot be used."""
    return f"If no other copy is there, delete the folder {folder} and train the run again."


@dataclass(frozen=True)
class Arm:
    """One side of a comparison. `settings` always holds `n_iters`: 1 is the Transformer."""

    name: str  # names the folder of its runs
    settings: Mapping[str, Any]
    after: str | None = None  # the arm before it, whose trained model of the same seed this one goes on with

    @property
    def n_iters(self) -> int:
        return self.settings["n_iters"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One scale at which an artefact is run."""

    about: str
    takes: str
    data: str = ""  # name of the data set; "" if no files are read
    seeds: tuple[int, ...] = ()
    arms: tuple[Arm, ...] = ()
    config: Any = None  # a dataclass of plain values, shared by all arms
    floor: float | None = None  # the metric that the SoftMax arms must reach before arms are compared
    metric: str | None = None  # where it is not its artefact's


@dataclass(frozen=True)
class Run:
    """What is trained and kept as a unit."""

    artefact: str
    preset: str
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where the run lives, below the output folder."""
        return Path(self.artefact, self.preset, self.arm.name, f"seed-{self.seed}")

    @property
    def before(self) -> Path | None:
        """Where the run lives that must be finished before this one begins."""
        return None if self.arm.after is None else self.folder.parents[1] / self.arm.after / self.folder.name


@dataclass(frozen=True)
class Record:
    """A finished run as it is read back: `metrics.json` and `run.json` of its folder."""

    metrics: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def is_continued(self) -> bool:
        """Whether it went on with the trained model of another run."""
        return bool(self.metrics.get("after"))

    @property
    def final(self) -> Mapping[str, Any]:
        """The last epoch."""
        return self.metrics["epochs"][-1]


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A figure or a table of the paper."""

    name: str
    title: str
    paper: str  # the paper's number, in words
    metric: str = "accuracy"  # of epochs[…]["test"]
    presets: Mapping[str, Preset] = field(default_factory=dict)
    paper_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # arm → {"median": …, "best": …}
    task: Callable[[Preset, Arm, int, Path | None], Task] | None = None
    identical_runs_in: tuple[str, ...] = ()  # artefacts some of whose runs are the same trainings
    make: Callable[[Preset, Path], str] | None = None  # where nothing is trained: fills a folder, says what is in it

    def metric_of(self, preset: str) -> str:
        return (preset in self.presets and self.presets[preset].metric) or self.metric
