"""First-order limits: `ε T^∞ → W_V x` and, with the cost "l2", `ε T¹ → W_V W_K⁻¹W_Q x`.

Under Assumption 1 the latter is −W_QᵀW_Q x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sinkformers.flows import AttentionMap, Bump, Projections, first_order_limit
from sinkformers.lab.theory.sweep import Sweep, inside, sweep


@dataclass(frozen=True)
class FirstOrder:
    by_eps: tuple[Sweep, ...]


def run(*, per_axis: tuple[int, int], eps: tuple[Sequence[float], Sequence[float]]) -> FirstOrder:
    """Compute errors by ε in one and two dimensions, with `per_axis` quadrature points per axis."""
    return FirstOrder(tuple(_errors(dim, per_axis[dim - 1], eps[dim - 1]) for dim in (1, 2)))


def _errors(dim: int, per_axis: int, widths: Sequence[float]) -> Sweep:
    measure = Bump(4, dim).quadrature(per_axis)
    part = inside(measure, 0.4)
    eye = torch.eye(dim, dtype=torch.float64)
    tilt = eye + 0.2 * eye.flip(0).triu()
    projections = {"Sinkhorn": Projections.tied(tilt), "SoftMax": Projections.tied(tilt, 1.1 * eye)}
    rows = []
    for eps in widths:
        row = [eps]
        for arm, used in projections.items():
            softmax = arm == "SoftMax"
            attention = AttentionMap(used, eps=eps, cost="l2", n_iters=1 if softmax else math.inf)
            limit = part.points @ first_order_limit(used, softmax=softmax).mT
            row.append(part.norm(eps * attention(measure)(part.points) - limit))
        rows.append(row)
    columns = ("ε", *projections)
    title = f"Distance of εT from its limit, {dim}-D: SoftMax with W_Q ≠ W_K, {len(measure)} particles"
    return sweep(title, "L²(μ) within 0.4 of the origin", columns, rows, fitted=columns[1:])
