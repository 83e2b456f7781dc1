"""No time without agreement: a row's output and gradients are compared with float64 before its clock starts.

Rows of Sinkhorn attention are compared with the library's reference, at the limit with dense algebra, causal ones with
the weights of `causal_sinkhorn`, and SoftMax rows with the formula of SoftMax.
Deviations are relative to the largest entry of each tensor.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.case import TRAINED_BIAS, Case, Inputs, Masks, with_known_answer
from benchmarks.exact_limit import exact_limit
from benchmarks.rows import ROWS
from benchmarks.rows.row import refuse_mask
from benchmarks.steps import Step
from sinkformers import causal_sinkhorn, sinkhorn_attention

TOLERANCE = 1e-4
TIMES_EAGER = 2.0  # how far off half precision may be, in units of the error of eager SoftMax in the same dtype
NOTHING: Mapping[str, float] = MappingProxyType({})


class Checked(NamedTuple):
    """How far off a row was, how long the call took that showed it, how far off it may be, and what else was found."""

    deviation: float
    seconds: float
    tolerance: float = TOLERANCE
    found: Mapping[str, float] = NOTHING


def check(step: Step, expected: Callable[[], Sequence[Tensor]]) -> Checked:
    """Compare one call of a step with what it should have computed."""
    step.reset()
    start = time.perf_counter()
    step.call()
    seconds = time.perf_counter() - start
    return Checked(deviation(step.outcome(), expected()), seconds)


def deviation(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the worst difference, relative to the largest entry of its tensor; infinite if anything is not finite."""
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
    """Compare one call of a row with float64, on inputs whose answer is known."""
    return _compare(case, prepare, formula)._replace(tolerance=tolerance(case))


def tolerance(case: Case) -> float:
    """Return how far off a row may be.

    In float32 a rounding of sharp scores is as much larger as they are; at the limit the tolerance of the column sums
    is added. In another dtype the error may be at most twice that of eager SoftMax attention in this dtype on the same
    inputs.
    """
    if case.dtype == "float32":
        return TOLERANCE * max(1.0, case.std) + (case.tol or 0.0)
    return TIMES_EAGER * _eager_error(replace(case, n_iters=1))


@functools.lru_cache(maxsize=8)
def _eager_error(case: Case) -> float:
    return _compare(case, ROWS["softmax"].prepare, "softmax").deviation


def _compare(case: Case, prepare: Callable[[Inputs], Step], formula: str) -> Checked:
    inputs, base, index = with_known_answer(case)
    return check(prepare(inputs), lambda: [x[..., index, :] for x in expected(base.case, formula)])


@functools.lru_cache(maxsize=8)
def expected(case: Case, formula: str) -> tuple[Tensor, ...]:
    """Return output and gradients in float64, one head at a time so that the reference's graph stays small."""
    _, inputs, _ = with_known_answer(case)
    sinkhorn = _causal if case.is_causal else _sinkhorn if case.tol is None else _limit
    function = {"sinkhorn": sinkhorn, "softmax": _softmax}[formula]
    heads: list[tuple[Tensor, ...]] = []
    for batch in range(case.batch):
        for head in range(case.heads):
            tokens = [x[batch, head].double().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
            masks = _of_head(inputs.masks, batch, head)
            if case.is_causal:
                masks = replace(masks, scores=torch.ones(case.n, case.n, dtype=torch.bool).tril())
            if case.mask == TRAINED_BIAS and masks.scores is not None:
                tokens.append(masks.scores.requires_grad_())
            out = function(*tokens[:3], masks, case.n_iters)
            gradients = ()
            if inputs.grad is not None:
                gradients = torch.autograd.grad(out, tokens, inputs.grad[batch, head].double())
            heads.append((out.detach(), *gradients))
    found = [torch.stack(parts).unflatten(0, (case.batch, case.heads)) for parts in zip(*heads, strict=True)]
    # The bias is shared by the batch: its gradient, the fifth result, is a sum over the batch.
    return (*found[:4], *(gradient.sum(0, keepdim=True) for gradient in found[4:]))


def _of_head(masks: Masks, batch: int, head: int) -> Masks:
    """Return the masks of one head, a bias in float64."""
    tokens = None if masks.tokens is None else masks.tokens[batch]
    if masks.scores is None:
        return Masks(tokens)
    scores = masks.scores[min(batch, len(masks.scores) - 1), min(head, masks.scores.shape[1] - 1)]
    return Masks(tokens, scores.double() if scores.is_floating_point() else scores)


def _sinkhorn(query: Tensor, key: Tensor, value: Tensor, masks: Masks, n_iters: int) -> Tensor:
    tokens = masks.tokens
    return sinkhorn_attention(
        query, key, value, masks.scores, n_iters=n_iters, query_mask=tokens, key_mask=tokens, backend="reference"
    )


def _causal(query: Tensor, key: Tensor, value: Tensor, masks: Masks, n_iters: int) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return causal_sinkhorn(scores, n_iters=n_iters, mask=masks.scores) @ value


def _limit(query: Tensor, key: Tensor, value: Tensor, masks: Masks, n_iters: int) -> Tensor:
    refuse_mask(masks, "the limit by dense algebra")
    return exact_limit(query @ key.mT / math.sqrt(query.shape[-1])) @ value


def _softmax(query: Tensor, key: Tensor, value: Tensor, masks: Masks, n_iters: int) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if masks.tokens is not None:
        scores = scores.masked_fill(~masks.tokens, -math.inf)
    if masks.scores is not None and masks.scores.dtype == torch.bool:
        scores = scores.masked_fill(~masks.scores, -math.inf)
    elif masks.scores is not None:
        scores = scores + masks.scores
    return scores.softmax(-1) @ value
