"""OTT-JAX: its Sinkhorn solver with Anderson acceleration and with adaptive momentum, jitted, in float64.

OTT's last update is that of the columns, so it is given the transposed scores, and the last row step is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows.row import peer
from benchmarks.solvers.solver import MOST_PRODUCTS, Solution, Solver, quarters

EXTRA = "peers-ott"
ACCELERATIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "anderson": lambda acceleration: {"anderson": acceleration.AndersonAcceleration(memory=5)},
    "momentum": lambda acceleration: {"momentum": acceleration.Momentum(start=30)},
}


def _by(name: str) -> Callable[[Tensor, float], Solution]:
    def solve(scores: Tensor, goal: float) -> Solution:
        """`goal` is the mean of the relative column errors, which is the sum of the errors of masses 1/n."""
        jax = peer("jax", EXTRA)
        with _double(jax):
            weights, count = jax.block_until_ready(_solver(name, goal)(jax.numpy.asarray(scores.numpy())))
            return Solution(torch.from_numpy(jax.device_get(weights).copy()), 2 * int(count))

    return solve


@functools.cache
def _solver(name: str, goal: float) -> Callable[[Any], Any]:
    jax, geometry = peer("jax", EXTRA), peer("ott.geometry.geometry", EXTRA)
    linear = peer("ott.problems.linear.linear_problem", EXTRA)
    options = ACCELERATIONS[name](peer("ott.solvers.linear.acceleration", EXTRA))
    solver = peer("ott.solvers.linear.sinkhorn", EXTRA).Sinkhorn(
        threshold=goal, max_iterations=MOST_PRODUCTS // 2, **options
    )

    def solve(scores: Any) -> Any:
        found = solver(linear.LinearProblem(geometry.Geometry(cost_matrix=-scores.T, epsilon=1.0)))
        return jax.nn.softmax(scores + found.f, axis=-1), found.n_iters

    return jax.jit(solve)


def _double(jax: Any) -> Any:
    """Return the context in which JAX computes in float64; older versions have it elsewhere."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else peer("jax.experimental", EXTRA).enable_x64()


SOLVERS = [
    Solver("ott-anderson", "OTT-JAX, Anderson acceleration", _by("anderson"), quarters),
    Solver("ott-momentum", "OTT-JAX, momentum", _by("momentum"), quarters),
]
