"""Few normalisations: the flow for n_iters = 3 and 5 compared with that of T^∞."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sinkformers import marginal_error, sinkhorn
from sinkformers.flows import AttentionMap, Measure, Projections, energy_infinity, flow
from sinkformers.lab.theory.sweep import Sweep, sweep


@dataclass(frozen=True)
class Unconverged:
    by_count: Sweep


def run(*, n: int, eps: Sequence[float], counts: Sequence[int] = (1, 3, 5, 21), seed: int = 0) -> Unconverged:
    """Compute flows of particles in the plane, W_Q = W_K = 1 = −W_V, over time ε: initial marginals and end points."""
    start = Measure.uniform(torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    projections = Projections.tied(torch.eye(2, dtype=torch.float64))
    rows = []
    for width in eps:
        ends = {}
        for n_iters in (*counts, math.inf):
            way = flow(AttentionMap(projections, eps=width, n_iters=n_iters), start, (0.0, width))
            ends[n_iters] = way[-1]
        energies = {n_iters: energy_infinity(end, projections, eps=width).item() for n_iters, end in ends.items()}
        moved = start.norm(ends[math.inf].points - start.points)
        for n_iters in counts:
            _, columns = marginal_error(sinkhorn(start.points @ start.points.mT / width, n_iters=n_iters))
            gap = start.norm(ends[n_iters].points - ends[math.inf].points) / moved
            rows.append(
                (f"ε = {width:g}, n_iters {n_iters}", columns.item(), gap, energies[n_iters] / energies[math.inf])
            )
    return Unconverged(
        sweep(
            f"{n} particles in the plane after time ε, against the flow of the limit",
            "largest |column sum − 1| at the start; L²(μ) distance of the ends as a share of the way; energies' ratio",
            ("flow", "column error", "distance from T^∞", "F^∞ against T^∞"),
            rows,
        )
    )
