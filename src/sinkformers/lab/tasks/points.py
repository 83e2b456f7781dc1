"""Classification of point clouds: what Table 1 and Figures 2 and 3 have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkformers.lab.artefacts.artefact import Arm, Preset
from sinkformers.lab.data import Clouds, PointSet, data_folder, load_modelnet40, load_shapes
from sinkformers.lab.tasks.augmentation import drop_points, scaled, shifted, standardised, subset_of, turned
from sinkformers.lab.tasks.classification import entropy, hits, measured
from sinkformers.lab.tasks.config import TaskConfig
from sinkformers.lab.workbench.observation import observe
from sinkformers.modules.neighbours import Neighbourhoods

if TYPE_CHECKING:
    from accelerate import Accelerator

OBSERVED, OBSERVED_AT_A_TIME = 64, 8  # test shapes whose attention is watched
EVALUATED = 64  # test shapes at a time
CACHED = 256  # shapes at a time whose neighbourhoods are found
SHAPES = ""  # the data set of presets that read none


@dataclass(frozen=True, kw_only=True)
class PointConfig(TaskConfig):
    """Test shapes are taken as they are: their first `points`, standardised if training shapes are."""

    points: int  # of each shape
    subset: bool = False  # drawn anew from all of a shape's points each time, while training; else the first
    standardise: bool = False
    scale: tuple[float, float] | None = None  # along each axis by a factor of its own
    shift: float = 0.0  # along each axis, at most
    turn: float = 0.0  # about z, in radians at most
    drop: float = 0.0  # the largest share of points that is dropped

    def model(self, classes: int) -> nn.Module:
        raise NotImplementedError

    def neighbourhoods(self, points: Tensor) -> tuple[Neighbourhoods, ...] | None:
        """What the model would find in points (batch, n, 3) whatever its weights; None where it looks for nothing."""
        return None

    @property
    def keeps_points(self) -> bool:
        """Whether a shape has the same points in every epoch, so that its neighbourhoods can be kept."""
        return not self.subset and self.drop == 0


class PointTask:
    """Train a model on the training shapes, evaluate it on all test shapes.

    Where shapes keep their points, neighbourhoods are found once, before shapes are scaled.
    """

    def __init__(self, config: PointConfig, seed: int, shapes: PointSet) -> None:
        self.config, self.seed, self.shapes = config, seed, shapes
        self.recipe = config.recipe
        self.kept: dict[str, tuple[Neighbourhoods, ...] | None] = {}

    @property
    def facts(self) -> dict[str, Any]:
        sizes = {"train": len(self.shapes.train.labels), "test": len(self.shapes.test.labels)}
        return {"config": asdict(self.config), "data": {"name": self.shapes.name, **sizes}}

    def files(self) -> dict[str, bytes]:
        return {"classes.json": json.dumps(self.shapes.classes).encode()}

    def model(self) -> nn.Module:
        return self.config.model(len(self.shapes.classes))

    def batches(self, epoch: int) -> Sequence[Tensor]:
        order = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        batches = list(torch.randperm(len(self.shapes.train.labels), generator=order).split(self.recipe.batch))
        if len(batches) > 1 and len(batches[-1]) == 1:  # BatchNorm cannot learn from one shape
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def losses(self, model: nn.Module, examples: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points, labels = self._take(self.shapes.train, examples, model)
        around = self._around("train", self.shapes.train, examples, points) if self.config.keeps_points else ()
        logits = model(self._augmented(points), *around)
        return entropy(logits, labels), {"accuracy": hits(logits, labels)}

    def weight(self, examples: Tensor) -> float:
        return len(examples)

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        n = len(self.shapes.test.labels)
        mine = torch.arange(n)[accelerator.process_index :: accelerator.num_processes]
        return measured(lambda examples: self._test(model, examples), mine.split(EVALUATED), n, accelerator)

    def observe(self, model: nn.Module) -> dict[str, Any]:
        n = len(self.shapes.test.labels)
        sample = torch.arange(min(OBSERVED, n)) * n // min(OBSERVED, n)  # files may be sorted by class
        return observe(model, lambda: [self._test(model, some) for some in sample.split(OBSERVED_AT_A_TIME)])

    def _test(self, model: nn.Module, examples: Tensor) -> tuple[Tensor, Tensor]:
        points, labels = self._take(self.shapes.test, examples, model)
        points = points[:, : self.config.points]
        around = self._around("test", self.shapes.test, examples, points)
        return model(standardised(points) if self.config.standardise else points, *around), labels

    def _take(self, clouds: Clouds, examples: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
        device = next(model.parameters()).device
        return clouds.points[examples].to(device), clouds.labels[examples].to(device)

    def _augmented(self, points: Tensor) -> Tensor:
        """Training shapes, each changed at random; what is drawn comes from torch's global generator."""
        config = self.config
        points = subset_of(points, config.points) if config.subset else points[:, : config.points]
        points = standardised(points) if config.standardise else points
        points = drop_points(points, config.drop) if config.drop else points
        points = turned(points, config.turn) if config.turn else points
        points = scaled(points, *config.scale) if config.scale is not None else points
        return shifted(points, config.shift) if config.shift else points

    def _around(self, part: str, clouds: Clouds, examples: Tensor, points: Tensor) -> tuple[Any, ...]:
        """The neighbourhoods of some shapes, as a further argument of the model if it takes one."""
        if part not in self.kept:
            self.kept[part] = self._find(clouds.points[:, : self.config.points])
        kept = self.kept[part]
        if kept is None:
            return ()
        return ([Neighbourhoods(*(each[examples].to(points.device) for each in stage)) for stage in kept],)

    def _find(self, points: Tensor) -> tuple[Neighbourhoods, ...] | None:
        found = []
        for some in points.split(CACHED):
            around = self.config.neighbourhoods(some)
            if around is None:
                return None
            found.append([[each.to(torch.int16) for each in stage] for stage in around])
        # Batches of stages of (centres, neighbours) to stages of them, each of all shapes.
        return tuple(Neighbourhoods(*map(torch.cat, zip(*stage, strict=True))) for stage in zip(*found, strict=True))


def task(preset: Preset, arm: Arm, seed: int, data: Path | None) -> PointTask:
    """What an arm of Table 1 trains."""
    config = preset.config.with_settings(arm.settings)
    return PointTask(config, seed, load(preset.data, config, data))


def load(data: str, config: PointConfig, folder: Path | None) -> PointSet:
    """The shapes of a preset, with no more points than its training draws from."""
    if data == SHAPES:
        return load_shapes(config.points)
    return load_modelnet40(data_folder(folder), None if config.subset else config.points)
