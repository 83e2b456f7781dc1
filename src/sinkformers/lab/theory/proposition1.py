"""Proposition 1: Sinkhorn's limit is invariant to terms of one point; SoftMax is not invariant to those of the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers import sinkhorn, sinkhorn_limit
from sinkformers.lab.theory.sweep import Sweep, sweep


@dataclass(frozen=True)
class Proposition1:
    changes: Sweep
    residual: float  # of the limits compared


def run(*, n: int, dim: int = 3, seed: int = 0) -> Proposition1:
    """Measure how weights change if `f_i`, `g_j` or both are added to scores (n, n), or for distances as scores."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries, keys, f, g = draw(n, dim), draw(n, dim), draw(n, 1), draw(n)
    scores = queries @ keys.mT
    others = {
        "C_ij + f_i": scores + f,
        "C_ij + g_j": scores + g,
        "C_ij + f_i + g_j": scores + f + g,
        "−½|q_i − k_j|²": -torch.cdist(queries, keys).square() / 2,
    }
    limit, info = sinkhorn_limit(scores, tol=1e-13, max_iters=100_001, return_info=True)
    softmax = sinkhorn(scores, n_iters=1)
    rows = [
        (
            name,
            _change(sinkhorn(other, n_iters=1), softmax),
            _change(sinkhorn_limit(other, tol=1e-13, max_iters=100_001), limit),
        )
        for name, other in others.items()
    ]
    changes = sweep(
        f"Weights of {n} points before and after a change of scores",
        "largest change of an entry, relative to the largest entry",
        ("scores", "SoftMax", "Sinkhorn"),
        rows,
    )
    return Proposition1(changes, float(info.residual))


def _change(after: Tensor, before: Tensor) -> float:
    return ((after - before).abs().max() / before.max()).item()
