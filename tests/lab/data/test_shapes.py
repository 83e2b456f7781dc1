"""Generated shapes: their points lie on the named surface, are always the same, and can be classified."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers.lab.data import load_shapes
from sinkformers.lab.data.sets import shapes

TURN, HALF = 2 * math.pi * torch.rand(500, generator=torch.Generator().manual_seed(0)), torch.rand(500)


def surface(name):
    return torch.stack(shapes.SHAPES[name](TURN, HALF), -1).double()


def test_the_set_is_fixed_and_can_be_classified():
    loaded = load_shapes(64, train=5, test=3)
    assert loaded.train.points.shape == (40, 64, 3)
    assert loaded.test.labels.tolist() == [k for k in range(8) for _ in range(3)]
    assert loaded.classes == ("cone", "cross", "cube", "cylinder", "disc", "helix", "sphere", "torus")
    assert torch.equal(loaded.train.points, load_shapes(64, train=5, test=3).train.points)
    assert not torch.equal(loaded.train.points[:3], loaded.test.points[:3])
    assert_close(loaded.train.points.norm(dim=-1).amax(-1), torch.ones(40), atol=1e-6, rtol=0)
    assert loaded.train.points.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "equation"),
    [
        ("sphere", lambda x, y, z: x**2 + y**2 + z**2 - 1),
        ("cylinder", lambda x, y, _z: x**2 + y**2 - 1),
        ("cone", lambda x, y, z: (x**2 + y**2).sqrt() - (1 - z) / 2),
        ("torus", lambda x, y, z: ((x**2 + y**2).sqrt() - 1) ** 2 + z**2 - 0.35**2),
        ("disc", lambda _x, _y, z: z),
        ("cube", lambda x, y, z: torch.stack([x, y, z]).abs().amax(0) - 1),
        ("helix", lambda x, _y, z: x - torch.cos(3 * math.pi * (z + 1))),
        ("cross", lambda x, y, z: torch.stack([x, y, z]).abs().sort(0).values[1]),
    ],
)
def test_points_are_on_the_surface(name, equation):
    points = surface(name)
    assert_close(equation(*points.unbind(-1)), torch.zeros(500).double(), atol=1e-5, rtol=0)
    assert points.abs().max() < 1.36


def test_all_six_faces_and_all_three_bars_have_points():
    cube, cross = surface("cube"), surface("cross")
    assert all((cube[:, k] == side).sum() > 40 for k in range(3) for side in (-1, 1))
    assert all((cross[:, k].abs() > 0).sum() > 100 for k in range(3))


def test_rotation_about_z():
    points = torch.randn(2, 5, 3)
    turned = shapes.turned(points, torch.tensor([math.pi / 2, 0.0]))
    assert_close(turned[0], torch.stack([-points[0, :, 1], points[0, :, 0], points[0, :, 2]], -1), atol=1e-6, rtol=0)
    assert_close(turned[1], points[1])
