"""No time without agreement: a row's output and gradients are compared with float64 before its clock starts.

Rows of Sinkhorn attention are compared with the library's reference, SoftMax rows with the formula of SoftMax.
Deviations are relative to the largest entry of each tensor.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.case import Case, Inputs, with_known_answer
from benchmarks.steps import Step
from sinkformers import sinkhorn_attention

TOLERANCE = 1e-4


class Checked(NamedTuple):
    """How far off a row was, and how long the call took that showed it."""

    deviation: float
    seconds: float


def check(step: Step, expected: Callable[[], Sequence[Tensor]]) -> Checked:
    """One call of a step, compared with what it should have come to."""
    step.reset()
    start = time.perf_counter()
    step.call()
    seconds = time.perf_counter() - start
    return Checked(deviation(step.outcome(), expected()), seconds)


def deviation(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The worst difference, relative to the largest entry of its tensor; infinite where something is not a number."""
    if len(got) != len(expected):
        return math.inf
    worst = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        if ours.shape != theirs.shape:
            return math.inf
        size = theirs.double().abs().max().item() or 1.0
        off = (ours.double() - theirs.double()).abs().max().item() / size
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def check_attention(case: Case, prepare: Callable[[Inputs], Step], formula: str) -> Checked:
    """One call of a row, on inputs whose answer is known."""
    inputs, base, index = with_known_answer(case)
    return check(prepare(inputs), lambda: [x[..., index, :] for x in expected(base.case, formula)])


@functools.lru_cache(maxsize=8)
def expected(case: Case, formula: str) -> tuple[Tensor, ...]:
    """Output and gradients in float64, one head at a time so that the reference's graph stays small."""
    _, inputs, _ = with_known_answer(case)
    function = {"sinkhorn": _sinkhorn, "softmax": _softmax}[formula]
    heads: list[tuple[Tensor, ...]] = []
    for batch in range(case.batch):
        real = None if inputs.real is None else inputs.real[batch]
        for head in range(case.heads):
            tokens = [x[batch, head].double().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
            out = function(*tokens, real, case.n_iters)
            gradients = ()
            if inputs.grad is not None:
                gradients = torch.autograd.grad(out, tokens, inputs.grad[batch, head].double())
            heads.append((out.detach(), *gradients))
    lead = (case.batch, case.heads)
    return tuple(torch.stack(parts).unflatten(0, lead) for parts in zip(*heads, strict=True))


def _sinkhorn(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, n_iters: int) -> Tensor:
    out = sinkhorn_attention(query, key, value, n_iters=n_iters, query_mask=real, key_mask=real, backend="reference")
    return out


def _softmax(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, n_iters: int) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if real is not None:
        scores = scores.masked_fill(~real, -math.inf)
    return scores.softmax(-1) @ value
