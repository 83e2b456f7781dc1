"""What anyone would write: Sinkhorn attention in a few lines of torch, with plain autograd."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.case import Case, Masks
from benchmarks.rows.row import Attention, Row, of_torch, refuse_mask


def kernel_domain(query: Tensor, key: Tensor, value: Tensor, n_iters: int) -> Tensor:
    """The ten lines: exponentiate once, then scale rows and columns. No masks, no safety; odd counts only."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    kernel = (scores - scores.amax(-1, keepdim=True)).exp()
    rows, columns = kernel.sum(-1, keepdim=True).reciprocal(), torch.ones(())
    for _ in range(n_iters // 2):
        columns = (kernel * rows).sum(-2, keepdim=True).reciprocal()
        rows = (kernel * columns).sum(-1, keepdim=True).reciprocal()
    return (kernel * rows * columns) @ value


def log_domain(query: Tensor, key: Tensor, value: Tensor, n_iters: int) -> Tensor:
    """Normalise the logarithms, rows first."""
    logits = query @ key.mT / math.sqrt(query.shape[-1])
    for step in range(n_iters):
        logits = logits - logits.logsumexp(-2 if step % 2 else -1, keepdim=True)
    return logits.exp() @ value


# Without `fullgraph`, too many recompilations would fall back to eager and be timed as if compiled.
_kernel_domain_compiled = torch.compile(kernel_domain, dynamic=False, fullgraph=True)
_log_domain_compiled = torch.compile(log_domain, dynamic=False, fullgraph=True)


def _unmasked(function: Callable[[Tensor, Tensor, Tensor, int], Tensor], name: str) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor, case: Case, masks: Masks) -> Tensor:
        refuse_mask(masks, name)
        return function(query, key, value, case.n_iters)

    return attention


ROWS = [
    Row(
        "ten-lines",
        "ten lines, kernel domain, `torch.compile`",
        of_torch(_unmasked(_kernel_domain_compiled, "the ten-line loop")),
        matrices=4,
        matrices_per_step=0.5,
        compiled=True,
    ),
    Row(
        "log-loop",
        "log-domain loop",
        of_torch(_unmasked(log_domain, "the log-domain loop")),
        matrices=4,
        matrices_per_step=2,
    ),
    Row(
        "log-loop-compiled",
        "log-domain loop, `torch.compile`",
        of_torch(_unmasked(_log_domain_compiled, "the log-domain loop")),
        matrices=4,
        matrices_per_step=1,
        compiled=True,
    ),
]
