"""Point clouds in memory, and the size that all of them are brought to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Clouds(NamedTuple):
    """Points, float32 (n, points, 3), in random order within a shape, and the class of each shape, int64 (n,)."""

    points: Tensor
    labels: Tensor


class PointSet(NamedTuple):
    """A data set for classification: label k is `classes[k]`. The test part is never trained on."""

    train: Clouds
    test: Clouds
    classes: tuple[str, ...]
    name: str


def on_unit_sphere(points: Tensor) -> Tensor:
    """Points (…, n, 3) centred on their mean, the farthest at distance 1; where all are one, all are zero."""
    centred = points - points.mean(-2, keepdim=True)
    radius = centred.norm(dim=-1).amax(-1)[..., None, None]
    return centred / radius.where(radius > 0, 1.0)
