"""Eight kinds of generated shapes: point clouds for runs without a download."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sinkformers.lab.data.clouds import Clouds, PointSet, on_unit_sphere

if TYPE_CHECKING:
    from torch import Tensor

NOISE = 0.02
STRETCH = (0.6, 1.4)


def _sphere(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    height = 2 * v - 1
    around = (1 - height.square()).sqrt()
    return around * u.cos(), around * u.sin(), height


def _cylinder(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return u.cos(), u.sin(), 2 * v - 1


def _cone(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    around = v.sqrt()
    return around * u.cos(), around * u.sin(), 1 - 2 * around


def _torus(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    around, turn = 1 + 0.35 * (2 * math.pi * v).cos(), 0.35 * (2 * math.pi * v).sin()
    return around * u.cos(), around * u.sin(), turn


def _disc(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    around = v.sqrt()
    return around * u.cos(), around * u.sin(), u.new_zeros(u.shape)


def _helix(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (6 * math.pi * v).cos(), (6 * math.pi * v).sin(), 2 * v - 1


def _cube(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    face = (u / (2 * math.pi) * 6).floor().clamp(max=5)
    across, along = 2 * (u / (2 * math.pi) * 6 - face) - 1, 2 * v - 1
    side, axis = 2 * (face % 2) - 1, face // 2
    planes = torch.stack([side, across, along])
    return tuple(planes.gather(0, ((k - axis) % 3).long()[None])[0] for k in range(3))  # pyright: ignore[reportReturnType]


def _cross(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    axis = (u / (2 * math.pi) * 3).floor().clamp(max=2)
    bar = torch.where(axis[None] == torch.arange(3.0).view(3, *(1,) * u.dim()), 2 * v - 1, torch.zeros_like(v))
    return bar[0], bar[1], bar[2]


# Each function returns the coordinates of points for angles u in [0, 2π) and numbers v in [0, 1).
SHAPES = {
    "cone": _cone,
    "cross": _cross,
    "cube": _cube,
    "cylinder": _cylinder,
    "disc": _disc,
    "helix": _helix,
    "sphere": _sphere,
    "torus": _torus,
}


def load_shapes(points: int = 128, *, train: int = 24, test: int = 8) -> PointSet:
    """Generate `train` and `test` shapes of each kind: rotated about z, stretched along their axes, with noise added.

    The result is always the same.

    Examples:
        >>> from sinkformers.lab.data import load_shapes
        >>> load_shapes(64).train.points.shape
        torch.Size([192, 64, 3])
    """
    return PointSet(_part(points, train, seed=0), _part(points, test, seed=1), tuple(SHAPES), "shapes")


def _part(points: int, each: int, seed: int) -> Clouds:
    import torch

    generator = torch.Generator().manual_seed(seed)
    clouds = []
    for make in SHAPES.values():
        u, v = torch.rand(2, each, points, generator=generator)
        low, high = STRETCH
        stretch = low + (high - low) * torch.rand(each, 1, 3, generator=generator)
        noise = NOISE * torch.randn(each, points, 3, generator=generator)
        angle = 2 * math.pi * torch.rand(each, generator=generator)
        clouds.append(turned((torch.stack(make(2 * math.pi * u, v), -1)) * stretch + noise, angle))
    return Clouds(on_unit_sphere(torch.cat(clouds)), torch.arange(len(SHAPES)).repeat_interleave(each))


def turned(points: Tensor, angle: Tensor) -> Tensor:
    """Rotate each cloud of `points` (batch, n, 3) about z by its angle (batch,)."""
    import torch

    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    x, y, z = points.unbind(-1)
    return torch.stack([x * cos - y * sin, x * sin + y * cos, z], -1)
