"""Infinite depth: a stack of L tied attention layers with step 1/L against the differential equation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers import sinkhorn, sinkhorn_limit
from sinkformers.flows import HEUN, AttentionMap, Measure, Projections, flow
from sinkformers.lab.theory.sweep import Sweep, sweep


@dataclass(frozen=True)
class DeepLimit:
    by_depth: Sweep


def run(*, depths: Sequence[int], n: int, dim: int = 3, seed: int = 0) -> DeepLimit:
    """Compare L layers `x ← x + (1/L) K x W_Vᵀ` with the flow, for n_iters 1, 3 and ∞, and Heun's method."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    projections = Projections.tied(torch.randn(dim, dim, generator=generator, dtype=torch.float64) / 2)
    counts = {"n_iters 1": 1, "n_iters 3": 3, "limit": math.inf}
    measure = Measure.uniform(start)
    ends, heun = {}, []
    for name, n_iters in counts.items():
        attention = AttentionMap(projections, n_iters=n_iters, tol=1e-13)
        ends[name] = flow(attention, measure, (0.0, 1.0), rtol=1e-11, atol=1e-11).states[-1]
        if n_iters == math.inf:
            heun = [flow(attention, measure, (0.0, 1.0), method=HEUN, h=1 / depth).states[-1] for depth in depths]
    rows = []
    for place, depth in enumerate(depths):
        stacks = {name: stack(start, projections, depth, n_iters) for name, n_iters in counts.items()}
        gaps = [(stacks[name] - ends[name]).abs().max().item() for name in counts]
        rows.append((depth, *gaps, (heun[place] - ends["limit"]).abs().max().item()))
    columns = ("L", *counts, "limit, Heun")
    title = f"A stack of L tied layers of step 1/L, {n} tokens in {dim}-D, against the flow over time 1"
    return DeepLimit(sweep(title, "largest coordinate", columns, rows, fitted=columns[1:]))


def stack(x: Tensor, projections: Projections, depth: int, n_iters: float) -> Tensor:
    """Apply the residual network, with the operator of the library and without its flows."""
    for _ in range(depth):
        scores = x @ projections.interaction @ x.mT
        if n_iters == math.inf:
            weights = sinkhorn_limit(scores, tol=1e-13, max_iters=10_001)
        else:
            weights = sinkhorn(scores, n_iters=int(n_iters))
        x = x + weights @ x @ projections.value.mT / depth
    return x
