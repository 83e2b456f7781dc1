"""Point clouds in memory, and their normalisation to the unit sphere."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Clouds(NamedTuple):
    """Points, float32 (n, points, 3), in random order within a shape, and the class of each shape, int64 (n,)."""

    points: Tensor
    labels: Tensor


class PointSet(NamedTuple):
    """A data set for classification: label k is `classes[k]`. Nothing is trained on the test part."""

    train: Clouds
    test: Clouds
    classes: tuple[str, ...]
    name: str


def on_unit_sphere(points: Tensor) -> Tensor:
    """Centre points (…, n, 3) on their mean and divide by the largest distance from it; equal points become zeros."""
    centred = points - points.mean(-2, keepdim=True)
    radius = centred.norm(dim=-1).amax(-1)[..., None, None]
    return centred / radius.where(radius > 0, 1.0)
