"""Classification of one shape, from a file of points or a mesh, with the attention of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sinkformers import watch_attention
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.data import on_unit_sphere, read_points
from sinkformers.lab.inference.trained import TrainedRun, on
from sinkformers.lab.tasks.augmentation import standardised
from sinkformers.lab.tasks.points import PointConfig
from sinkformers.models import PointCloudTransformer
from sinkformers.modules.neighbours import take_points


@dataclass(frozen=True)
class Attention:
    """Attention of a layer: the points (m, 3) that it attends to, and the attention that each receives (m,).

    The attention is relative to the mean: 1 is uniform. If `picked` is set, it is the attention that the point `picked`
    receives from each point.
    """

    layer: str
    places: Tensor
    shares: Tensor
    picked: int | None = None


@dataclass(frozen=True)
class Prediction:
    """A shape (n, 3) as the model saw it, and its classes, the most probable first."""

    file: Path
    points: Tensor
    classes: list[tuple[str, float]]
    attention: Attention | None


class CloudClassifier:
    """A trained classifier of point clouds."""

    def __init__(self, run: TrainedRun) -> None:
        assert isinstance(run.config, PointConfig)
        self.config, self.names = run.config, run.classes()
        self.model: nn.Module = run.load_into(run.config.model(len(self.names)))

    @torch.no_grad()
    def predict(self, file: Path, *, layer: str | None = None, point: int | None = None) -> Prediction:
        """Classify the shape in a file. `layer` selects the layer whose attention is returned, by default the last;
        `point` selects one of the points that it attends to."""
        points, given = self.read(file)
        with watch_attention(self.model, keep_weights=True) as watch:
            logits = self.model(*on(self.model, given))
        likely = logits[0].softmax(-1).cpu()
        order = likely.argsort(descending=True, stable=True).tolist()
        classes = [(self.names[number], float(likely[number])) for number in order]
        weights = {name: seen.calls[0].weights for name, seen in watch.items() if seen.calls}
        return Prediction(file, points[0], classes, self._attention(points, weights, layer, point))

    def read(self, file: Path) -> tuple[Tensor, Tensor]:
        """Return the points (1, n, 3) of a shape, and the same as the model takes them."""
        points = self._sampled(file)
        return points, standardised(points) if self.config.standardise else points

    def _sampled(self, file: Path) -> Tensor:
        """Return points (1, n, 3), as many as the model was trained with, in the unit sphere; always the same."""
        n = self.config.points
        points = read_points(file, n)
        if len(points) < n:
            raise ExperimentError(
                f"{file} has {len(points):,} points, and the model was trained with {n:,}; give a mesh, or more points."
            )
        chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:n]
        return on_unit_sphere(points[chosen])[None]

    def _attention(
        self, points: Tensor, weights: dict[str, Tensor | None], layer: str | None, point: int | None
    ) -> Attention | None:
        places = self.places(points)
        seeing = {
            name: each[0].mean(0).cpu()
            for name, each in weights.items()
            if each is not None and each.shape[-1] == len(places)
        }
        if layer is None and point is not None:
            seeing = {name: each for name, each in seeing.items() if len(each) == len(places)}
        if layer is not None and layer not in seeing:
            raise ExperimentError(f"no layer {layer!r} attends to points. These do: {', '.join(seeing)}.")
        if not seeing:
            if point is not None:
                raise ExperimentError("in this model points do not attend to points, so --point cannot be used.")
            return None
        name = layer or list(seeing)[-1]
        rows, columns = seeing[name].shape
        if point is None:
            return Attention(name, places, seeing[name].sum(0) * columns / rows)
        if rows != columns:
            raise ExperimentError(f"in {name} points do not attend to points; choose another --layer.")
        if not 0 <= point < columns:
            raise ExperimentError(f"--point must be a number from 0 to {columns - 1}; got {point}.")
        return Attention(name, places, seeing[name][:, point] * rows, point)

    def places(self, points: Tensor) -> Tensor:
        """Return the points that attention sees of points (1, n, 3): all, or the centres of the last stage."""
        if isinstance(self.model, PointCloudTransformer):
            for stage in self.model.neighbourhoods(*on(self.model, points)):
                points = take_points(points, stage.centres.cpu())
        return points[0]
