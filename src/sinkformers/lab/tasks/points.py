"""Classification of point clouds, for Table 1 and Figures 2 and 3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkformers.lab.artefacts.artefact import Arm, Preset
from sinkformers.lab.data import Clouds, PointSet, data_folder, load_modelnet40, load_shapes
from sinkformers.lab.tasks.augmentation import drop_points, scaled, shifted, standardised, subset_of, turned
from sinkformers.lab.tasks.classification import entropy, hits, measured
from sinkformers.lab.tasks.config import SHAPES, PointConfig
from sinkformers.lab.workbench.observation import observe
from sinkformers.modules.neighbours import Neighbourhoods

if TYPE_CHECKING:
    from accelerate import Accelerator

OBSERVED, OBSERVED_AT_A_TIME = 64, 8  # test shapes on which attention is measured
EVALUATED = 64  # test shapes per batch
CACHED = 256  # shapes per batch in the search for neighbours


class PointTask:
    """Train a model on the training shapes, evaluate it on all test shapes.

    If shapes keep their points, neighbourhoods are computed once, before augmentation.
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
        if len(batches) > 1 and len(batches[-1]) == 1:  # BatchNorm needs more than one shape
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
        """Return randomly augmented training shapes, with torch's global generator."""
        config = self.config
        points = subset_of(points, config.points) if config.subset else points[:, : config.points]
        points = standardised(points) if config.standardise else points
        points = drop_points(points, config.drop) if config.drop else points
        points = turned(points, config.turn) if config.turn else points
        points = scaled(points, *config.scale) if config.scale is not None else points
        return shifted(points, config.shift) if config.shift else points

    def _around(self, part: str, clouds: Clouds, examples: Tensor, points: Tensor) -> tuple[Any, ...]:
        """Return the neighbourhoods of some shapes, as a further argument of the model if it takes one."""
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
        # From batches of stages of (centres, neighbours) to stages, each for all shapes.
        return tuple(Neighbourhoods(*map(torch.cat, zip(*stage, strict=True))) for stage in zip(*found, strict=True))


def task(preset: Preset, arm: Arm, seed: int, data: Path | None) -> PointTask:
    """Return the task of an arm of Table 1."""
    config = preset.config.with_settings(arm.settings)
    return PointTask(config, seed, load(preset.data, config, data))


def load(data: str, config: PointConfig, folder: Path | None) -> PointSet:
    """Return the shapes of a preset, with as many points as its training needs."""
    if data == SHAPES:
        return load_shapes(config.points)
    return load_modelnet40(data_folder(folder), None if config.subset else config.points)
