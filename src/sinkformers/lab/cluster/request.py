"""What a cluster is asked for: runs, each as one job, with its command and its resources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from sinkformers.lab.artefacts.artefact import ExperimentError, Run
from sinkformers.lab.cluster.job import TrainingJob
from sinkformers.lab.cluster.resources import Resources

JOBS = "jobs"  # folder beside the arms, with the files of submitit


class Request(NamedTuple):
    """Runs of one preset, and how they are to be trained."""

    runs: tuple[Run, ...]
    out: Path  # absolute: jobs start elsewhere
    options: tuple[str, ...]  # of `sinkformers run`, which all runs share
    resources: Resources
    at_once: int | None = None  # jobs that run at the same time; None is as many as the cluster allows

    @property
    def artefact(self) -> str:
        return self.runs[0].artefact

    @property
    def preset(self) -> str:
        return self.runs[0].preset

    @property
    def folder(self) -> Path:
        """The folder with the files of submitit, made by `make_folder`."""
        return self.out / self.artefact / self.preset / JOBS

    def job(self, run: Run) -> TrainingJob:
        return TrainingJob(self.command(run), self.out / run.folder, self.resources.cpus)

    def command(self, run: Run) -> tuple[str, ...]:
        """Return the command that trains one run, by torchrun if several processes train it together."""
        processes = self.resources.processes
        torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m")
        return (
            *(sys.executable, "-m", *(torchrun if processes > 1 else ()), "sinkformers.lab.cli"),
            *("run", run.artefact, "--preset", run.preset, "--arms", run.arm.name, "--seeds", str(run.seed)),
            *("--out", str(self.out), *self.options),
        )

    def make_folder(self) -> Path:
        """Make the folder with the files of submitit, and return it."""
        odd = next((character for character in "%\n" if character in str(self.folder)), None)
        if odd is not None:
            raise ExperimentError(
                f"--cluster: {self.out} contains {odd!r}, which has a meaning in names of log files. "
                "Choose another --out."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExperimentError(
                f"cannot use {self.folder}: {error.strerror or error}. Choose another --out, one that can be written."
            ) from None
        return self.folder
