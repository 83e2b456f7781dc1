"""POT, Python Optimal Transport: its batched projections.

One of POT's iterations normalises rows and columns, so (n_iters − 1)/2 of them, and a last row step of ours, are the
same n_iters normalisations. POT looks for convergence in the first iteration and every tenth after it; with `tol=0` it
never finds it.
"""

import math
from types import ModuleType

from torch import Tensor

from benchmarks.case import Case, Masks
from benchmarks.rows.row import Row, of_torch, peer, refuse_mask


def _pot(case: Case, masks: Masks) -> ModuleType:
    refuse_mask(masks, "POT's batch")
    return peer("ot.batch", "test")


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT / math.sqrt(query.shape[-1])).flatten(0, 1)


def _masses(scores: Tensor) -> tuple[Tensor, Tensor]:
    batch, n, m = scores.shape
    return scores.new_full((batch, n), 1 / n), scores.new_full((batch, m), 1 / m)


def _log(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
    pot, scores = _pot(case, masks), _scores(query, key)
    result = pot.bregman_log_projection_batch(
        scores, *_masses(scores), max_iter=case.n_iters // 2, tol=0, grad="autodiff"
    )
    return result["log_T"].softmax(-1).view(*query.shape[:2], *scores.shape[1:]) @ value


def _kernel(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
    pot, scores = _pot(case, masks), _scores(query, key)
    kernel = (scores - scores.amax(-1, keepdim=True)).exp()
    result = pot.bregman_projection_batch(kernel, *_masses(scores), max_iter=case.n_iters // 2, tol=0, grad="autodiff")
    plan = result["T"]
    weights = plan / plan.sum(-1, keepdim=True)
    return weights.view(*query.shape[:2], *scores.shape[1:]) @ value


ROWS = [
    Row("pot-log", "POT batch, log domain", of_torch(_log), matrices=8, matrices_per_step=3),
    Row("pot-kernel", "POT batch, kernel domain", of_torch(_kernel), matrices=8, matrices_per_step=2),
]
