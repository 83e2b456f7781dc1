"""Farthest and nearest points, compared with their definitions point by point."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers.modules import neighbours
from sinkformers.modules.neighbours import farthest_points, nearest_points, neighbourhoods, take_points
from tests.rounding import rounding


def squared(a, b):
    return sum((x - y) ** 2 for x, y in zip(a.tolist(), b.tolist(), strict=True))


def plain_farthest(cloud, count, start):
    chosen = [start]
    while len(chosen) < count:
        rest = [i for i in range(len(cloud)) if i not in chosen]
        chosen.append(max(rest, key=lambda i: (min(squared(cloud[i], cloud[j]) for j in chosen), -i)))
    return chosen


def plain_nearest(cloud, centre, k):
    return sorted(range(len(cloud)), key=lambda i: (squared(cloud[i], centre), i))[:k]


def clouds():
    """Return random points; points on a grid, where most distances are equal; and repeated points."""
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3)[:23]
    repeated = torch.randn(8, 3)[torch.arange(23) % 8]
    return torch.stack([torch.randn(23, 3), grid, repeated]).double()


@pytest.mark.parametrize("count", [1, 2, 7, 23])
@pytest.mark.parametrize("start", [0, 5, 22])
def test_farthest_points_match_their_definition(count, start):
    points = clouds()
    found = farthest_points(points, count, start=start)
    assert found.tolist() == [plain_farthest(cloud, count, start) for cloud in points]


def test_the_first_point_is_farthest_from_the_mean_whatever_the_order():
    points, order = torch.randn(5, 23, 3).double(), torch.randperm(23)
    found = farthest_points(points, 7)
    assert found[:, 0].tolist() == [max(range(23), key=lambda i: squared(c[i], c.mean(0))) for c in points]
    assert torch.equal(order[farthest_points(points[:, order], 7)], found)


@pytest.mark.parametrize("k", [1, 4, 23])
@pytest.mark.parametrize("most", [1, 100, 2**22])
def test_nearest_points_match_their_definition(k, most, monkeypatch):
    monkeypatch.setattr(neighbours, "MOST_DISTANCES", most)
    points = clouds()
    centres = torch.cat([points[:, :5], torch.randn(3, 6, 3).double()], 1)
    found = nearest_points(points, centres, k)
    expected = [[plain_nearest(p, c, k) for c in own] for p, own in zip(points, centres, strict=True)]
    assert found.tolist() == expected


def test_float32_finds_duplicates_in_their_order():
    points = torch.randn(2, 5, 3)[:, torch.arange(20) % 5]
    found = nearest_points(points, points[:, :5], 4)
    assert found.tolist() == [[[i, i + 5, i + 10, i + 15] for i in range(5)]] * 2


def test_stages_follow_each_other():
    points = torch.randn(2, 31, 3)
    first, second = neighbourhoods(points, (13, 7), 5)
    assert [tuple(x.shape) for x in (*first, *second)] == [(2, 13), (2, 13, 5), (2, 7), (2, 7, 5)]
    centres = take_points(points, first.centres)
    assert torch.equal(second.centres, farthest_points(centres, 7))
    assert torch.equal(second.neighbours, nearest_points(centres, take_points(centres, second.centres), 5))
    assert torch.equal(first.neighbours[..., 0], first.centres)  # a point is its own nearest


@pytest.mark.parametrize("shape", [(7,), (7, 5)])
def test_points_are_taken_with_their_gradient(shape):
    features = torch.randn(2, 11, 3, dtype=torch.float64, requires_grad=True)
    numbers = torch.randint(0, 11, (2, *shape))
    taken = take_points(features, numbers)
    expected = torch.stack([features[b][numbers[b]] for b in range(2)])
    assert torch.equal(taken, expected)
    seen = torch.randn_like(taken)
    grads = [torch.autograd.grad(out, features, seen)[0] for out in (taken, expected)]
    assert_close(*grads, **rounding(128))  # sums of up to 35 numbers of order 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: farthest_points(p, 0), r"farthest_points: count must be from 1 to the number of points, 9; got 0"),
        (lambda p: farthest_points(p, 10), r"got 10"),
        (lambda p: farthest_points(p, 3, start=9), r"start must be the index of a point, 0 to 8; got 9"),
        (lambda p: nearest_points(p, p, 10), r"nearest_points: k must be from 1 to the number of points, 9; got 10"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 9, 3))
