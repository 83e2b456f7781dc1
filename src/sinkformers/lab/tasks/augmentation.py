"""Random augmentation of shapes (batch, n, 3), each independently, with torch's global generator."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkformers.lab.data.sets.shapes import turned as turned_by

CLIP = 100  # coordinates are clipped at so many times their mean absolute value


def standardised(points: Tensor) -> Tensor:
    """Standardise each cloud to mean 0 and standard deviation 1 over all coordinates, as for Set Transformers."""
    bound = CLIP * points.abs().mean((1, 2), keepdim=True)
    clipped = points.clamp(-bound, bound)
    return (clipped - clipped.mean((1, 2), keepdim=True)) / clipped.std((1, 2), keepdim=True, correction=0)


def subset_of(points: Tensor, count: int) -> Tensor:
    """Return `count` distinct points of each cloud, in random order."""
    numbers = torch.rand(points.shape[:2], device=points.device).topk(count).indices
    return points.gather(1, numbers[..., None].expand(-1, -1, 3))


def drop_points(points: Tensor, most: float) -> Tensor:
    """Move a random share of the points of each cloud, uniform between 0 and `most`, onto its first point."""
    share = most * torch.rand(len(points), 1, device=points.device)
    dropped = torch.rand(points.shape[:2], device=points.device) < share
    return torch.where(dropped[..., None], points[:, :1], points)


def scaled(points: Tensor, low: float, high: float) -> Tensor:
    """Scale each axis of each cloud by a random factor between `low` and `high`."""
    return points * (low + (high - low) * torch.rand(len(points), 1, 3, device=points.device))


def shifted(points: Tensor, most: float) -> Tensor:
    """Shift each cloud at random by at most `most` along each axis."""
    return points + most * (2 * torch.rand(len(points), 1, 3, device=points.device) - 1)


def turned(points: Tensor, most: float) -> Tensor:
    """Rotate each cloud at random about z by at most `most` radians in either direction."""
    return turned_by(points, most * (2 * torch.rand(len(points), device=points.device) - 1))
