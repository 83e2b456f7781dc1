"""OTT-JAX: its Sinkhorn solver, unrolled, jitted and mapped over the heads.

OTT updates columns first, so it is given the transposed scores; as with POT, the last row step is ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Inputs
from benchmarks.rows.row import Row, peer, refuse_mask


class JaxStep:
    """A jitted function of arrays that were converted beforehand."""

    def __init__(self, function: Callable[..., Any], arrays: list[Any], jax: Any) -> None:
        self.function, self.arrays, self.jax = function, arrays, jax
        self.result: Any = None

    def reset(self) -> None:
        self.result = None

    def call(self) -> None:
        self.result = self.jax.block_until_ready(self.function(*self.arrays))

    def outcome(self) -> list[Tensor]:
        return [torch.from_numpy(self.jax.device_get(array).copy()) for array in self.result]


@functools.cache
def _attention(pairs: int) -> Callable[..., Any]:
    jax, geometry = peer("jax", "peers-ott"), peer("ott.geometry.geometry", "peers-ott")
    linear = peer("ott.problems.linear.linear_problem", "peers-ott")
    sinkhorn = peer("ott.solvers.linear.sinkhorn", "peers-ott")
    solver = sinkhorn.Sinkhorn(
        threshold=-1.0, inner_iterations=pairs, min_iterations=pairs, max_iterations=pairs, implicit_diff=None
    )

    def head(query: Any, key: Any, value: Any) -> Any:
        scores = query @ key.T / math.sqrt(query.shape[-1])
        if pairs:
            problem = linear.LinearProblem(geometry.Geometry(cost_matrix=-scores.T, epsilon=1.0))
            scores = scores + solver(problem).f
        return jax.nn.softmax(scores, axis=-1) @ value

    return jax.vmap(jax.vmap(head))


@functools.cache
def _step(pairs: int, backward: bool) -> Callable[..., Any]:
    jax, attention = peer("jax", "peers-ott"), _attention(pairs)

    def forward(query: Any, key: Any, value: Any) -> Any:
        return (attention(query, key, value),)

    def both(query: Any, key: Any, value: Any, grad: Any) -> Any:
        out, pull_back = jax.vjp(attention, query, key, value)
        return (out, *pull_back(grad))

    return jax.jit(both if backward else forward)


def _prepare(inputs: Inputs) -> JaxStep:
    refuse_mask(inputs.masks, "OTT-JAX, as timed here,")
    jax = peer("jax", "peers-ott")
    tensors = [inputs.query, inputs.key, inputs.value, *([] if inputs.grad is None else [inputs.grad])]
    arrays = [jax.numpy.asarray(x.numpy()) for x in tensors]
    return JaxStep(_step(inputs.case.n_iters // 2, inputs.case.backward), arrays, jax)


ROWS = [Row("ott", "OTT-JAX, unrolled, jitted", _prepare, matrices=8, matrices_per_step=2)]
