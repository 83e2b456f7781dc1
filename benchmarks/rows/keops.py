"""KeOps: the log-domain loop on symbolic matrices, nothing n×n in memory."""

import math

from torch import Tensor

from benchmarks.case import Case, Inputs, Masks
from benchmarks.rows.row import Row, of_torch, peer, refuse_mask
from benchmarks.steps import Step, Unavailable

LARGEST = 16 * 512**2  # scores: beyond, a call of its CPU code takes minutes


def _keops(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
    lazy = peer("pykeops.torch", "peers-keops").LazyTensor
    rows, columns = lazy(query.unsqueeze(-2).contiguous()), lazy(key.unsqueeze(-3).contiguous())
    scores = (rows * columns).sum(-1) * (1 / math.sqrt(query.shape[-1]))
    g = query.new_zeros(*key.shape[:-1], 1)
    f = -(scores + lazy(g.unsqueeze(-3))).logsumexp(dim=3)
    for _ in range(case.n_iters // 2):
        g = -(scores + lazy(f.unsqueeze(-2))).logsumexp(dim=2)
        f = -(scores + lazy(g.unsqueeze(-3))).logsumexp(dim=3)
    weights = (scores + lazy(f.unsqueeze(-2)) + lazy(g.unsqueeze(-3))).exp()
    return weights @ value


def _prepare(inputs: Inputs) -> Step:
    refuse_mask(inputs.masks, "KeOps, as timed here,")
    peer("pykeops.torch", "peers-keops")
    if inputs.case.entries > LARGEST:
        raise Unavailable("on a CPU a call of KeOps takes too long beyond 16 × 512")
    return of_torch(_keops)(inputs)


ROWS = [Row("keops", "KeOps, streaming log domain", _prepare)]
