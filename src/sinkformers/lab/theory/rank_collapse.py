"""Skip connections: without them all tokens become equal, with them it depends on the sign of W_V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers import sinkhorn
from sinkformers.lab.theory.sweep import Sweep, sweep

STEP = 0.25


@dataclass(frozen=True)
class RankCollapse:
    by_depth: Sweep


def run(*, depths: Sequence[int], n: int, dim: int = 8, seed: int = 0) -> RankCollapse:
    """Measure how far tokens (n, dim) are from all being equal by depth; n_iters 1 and 21, scores xᵀx'/√dim."""
    start = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    layers: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "no skip": lambda x, mixed: mixed,
        "skip, W_V > 0": lambda x, mixed: x + STEP * mixed,
        "skip, W_V < 0": lambda x, mixed: x - STEP * mixed,
    }
    tables: dict[str, list[float]] = {}
    for layer, apply in layers.items():
        for arm, n_iters in (("SoftMax", 1), ("Sinkhorn", 21)):
            x, found = start, []
            for depth in range(max(depths) + 1):
                if depth in depths:
                    found.append(spread(x))
                x = apply(x, sinkhorn(x @ x.mT / dim**0.5, n_iters=n_iters) @ x)
            tables[f"{arm}, {layer}"] = found
    rows = [(depth, *(column[k] for column in tables.values())) for k, depth in enumerate(depths)]
    return RankCollapse(
        sweep(
            f"Distance of {n} tokens in {dim}-D from all being equal, by depth (step {STEP} beside a skip connection)",
            "‖x − mean‖/‖x‖ (Frobenius)",
            ("depth", *tables),
            rows,
        )
    )


def spread(x: Tensor) -> float:
    """Return the relative distance of tokens (n, dim) from their mean."""
    return ((x - x.mean(0)).norm() / x.norm()).item()
