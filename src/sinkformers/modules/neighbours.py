"""Neighbourhoods in point clouds: farthest points as centres, and the nearest points of each.

Both are indices without a gradient, computed for a whole batch, and deterministic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_DISTANCES = 2**22  # computed at a time


class Neighbourhoods(NamedTuple):
    """Indices (batch, s) of centres among n points, and indices (batch, s, k) of the points around each."""

    centres: Tensor
    neighbours: Tensor


@torch.no_grad()
def farthest_points(points: Tensor, count: int, *, start: int | None = None) -> Tensor:
    """Return indices (batch, count) of points (batch, n, d), each farthest from all before it; no index repeats.

    The first is `start`, or by default the point farthest from the mean, which does not depend on the order of the
    points. Of equally far points the one with the lowest index is taken.

    Examples:
        >>> import torch
        >>> from sinkformers.modules.neighbours import farthest_points
        >>> farthest_points(torch.tensor([[[0.0], [1.0], [5.0], [3.0]]]), 3, start=0)
        tensor([[0, 2, 3]])
    """
    n = points.shape[-2]
    if not 1 <= count <= n:
        raise ValueError(f"farthest_points: count must be from 1 to the number of points, {n}; got {count}.")
    if start is not None and not 0 <= start < n:
        raise ValueError(f"farthest_points: start must be the index of a point, 0 to {n - 1}; got {start}.")
    if start is None:
        last = (points - points.mean(-2, keepdim=True)).square().sum(-1).argmax(-1, keepdim=True)
    else:
        last = torch.full((len(points), 1), start, device=points.device)
    planes = points.mT.contiguous()  # (batch, d, n)
    nearest = points.new_full((len(points), n), torch.inf)
    chosen = torch.empty(len(points), count, dtype=torch.int64, device=points.device)
    for index in range(count):
        chosen[:, index : index + 1] = last
        place = planes.gather(-1, last[:, None].expand(-1, planes.shape[1], -1))
        torch.minimum(nearest, (planes - place).square_().sum(1), out=nearest)
        nearest.scatter_(-1, last, -1.0)  # below all distances, so that duplicates do not select it again
        last = nearest.argmax(-1, keepdim=True)
    return chosen


@torch.no_grad()
def nearest_points(points: Tensor, centres: Tensor, k: int) -> Tensor:
    """Return indices (batch, s, k) of the points (batch, n, d) nearest to centres (batch, s, d), the nearest first.

    Distances are compared in float32; of equally near points the one with the lowest index comes first.

    Examples:
        >>> import torch
        >>> from sinkformers.modules.neighbours import nearest_points
        >>> nearest_points(torch.tensor([[[0.0], [1.0], [5.0], [3.0]]]), torch.tensor([[[4.0]]]), 3)
        tensor([[[2, 3, 1]]])
    """
    n = points.shape[-2]
    if not 1 <= k <= n:
        raise ValueError(f"nearest_points: k must be from 1 to the number of points, {n}; got {k}.")
    index = torch.arange(n, device=points.device)
    found = []
    for some in centres.split(max(1, MOST_DISTANCES // max(1, n * len(points))), -2):
        distances = torch.cdist(some, points, compute_mode="donot_use_mm_for_euclid_dist").float()
        # The bits of floats ≥ 0 sort as the floats do. With the index in the lower bits no two keys are equal.
        keys = (distances.view(torch.int32).long() << 32) | index
        found.append(keys.topk(k, largest=False).values & 0xFFFFFFFF)
    return torch.cat(found, -2)


def neighbourhoods(points: Tensor, sizes: Sequence[int], k: int) -> tuple[Neighbourhoods, ...]:
    """Return centres among points (batch, n, d) and their neighbours, then centres among those centres, and so on.

    `sizes` are the numbers of centres per stage; the k neighbours are points of the stage before.
    """
    stages = []
    for size in sizes:
        chosen = farthest_points(points, size)
        centres = points.gather(-2, chosen[..., None].expand(-1, -1, points.shape[-1]))
        stages.append(Neighbourhoods(chosen, nearest_points(points, centres, k)))
        points = centres
    return tuple(stages)


def take_points(features: Tensor, indices: Tensor) -> Tensor:
    """Return the features (batch, n, c) of the points with indices (batch, …): (batch, …, c)."""
    batch, n, width = features.shape
    first = torch.arange(batch, device=indices.device).view(-1, *(1,) * (indices.dim() - 1)) * n
    # The gradient of an embedding adds rows; that of indexing adds entries, and is far slower on the CPU.
    return F.embedding(indices + first, features.reshape(batch * n, width))
