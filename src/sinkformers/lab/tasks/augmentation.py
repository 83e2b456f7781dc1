"""Shapes (batch, n, 3) changed at random, each by draws of its own from torch's global generator."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkformers.lab.data.sets.shapes import turned as turned_by

CLIP = 100  # mean absolute coordinates


def standardised(points: Tensor) -> Tensor:
    """Every cloud with mean 0 and standard deviation 1 over all of its coordinates, as Set Transformers take them."""
    bound = CLIP * points.abs().mean((1, 2), keepdim=True)
    clipped = points.clamp(-bound, bound)
    return (clipped - clipped.mean((1, 2), keepdim=True)) / clipped.std((1, 2), keepdim=True, correction=0)


def subset_of(points: Tensor, count: int) -> Tensor:
    """`count` of a cloud's points, no two the same, in random order."""
    numbers = torch.rand(points.shape[:2], device=points.device).topk(count).indices
    return points.gather(1, numbers[..., None].expand(-1, -1, 3))


def drop_points(points: Tensor, most: float) -> Tensor:
    """A share of a cloud's points, drawn between 0 and `most`, moved onto its first point."""
    share = most * torch.rand(len(points), 1, device=points.device)
    dropped = torch.rand(points.shape[:2], device=points.device) < share
    return torch.where(dropped[..., None], points[:, :1], points)


def scaled(points: Tensor, low: float, high: float) -> Tensor:
    """Each axis of a cloud stretched by a factor of its own between `low` and `high`."""
    return points * (low + (high - low) * torch.rand(len(points), 1, 3, device=points.device))


def shifted(points: Tensor, most: float) -> Tensor:
    """A cloud moved by at most `most` along each axis."""
    return points + most * (2 * torch.rand(len(points), 1, 3, device=points.device) - 1)


def turned(points: Tensor, most: float) -> Tensor:
    """A cloud turned about z by at most `most` radians, either way."""
    return turned_by(points, most * (2 * torch.rand(len(points), device=points.device) - 1))
