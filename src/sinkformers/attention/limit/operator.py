"""`sinkformers::attend_limit`: query, key and value to the output at the limit, with the implicit gradient.

Between forward and backward only the potentials are saved, beside inputs and output.
"""

import torch

from sinkformers.attention.limit.backends import Native, Torch
from sinkformers.attention.limit.call import LimitAttentionCall, LimitAttentionResult
from sinkformers.core.backend import Backends, Declined
from sinkformers.core.operator import Operator
from sinkformers.core.problem import working_dtype

BACKENDS = Backends(
    Native(),
    Torch(),
    Declined("triton", "its kernels take a finite n_iters"),
    Declined("reference", "it has the unrolled gradient only"),
)


def _fake(call: LimitAttentionCall, backend: str) -> LimitAttentionResult:
    *lead, n, _ = call.query.shape
    out = call.query.new_empty(*lead, n, call.value.shape[-1], dtype=working_dtype(call.query.dtype))
    vectors = [out.new_empty(*lead, size) for size in 2 * (n, call.key.shape[-2])]
    by_head = [out.new_empty(lead, dtype=dtype) for dtype in (torch.bool, out.dtype, torch.int64, torch.bool)]
    return LimitAttentionResult(out, *vectors, *by_head)


attend_limit = Operator("attend_limit", LimitAttentionCall, LimitAttentionResult, BACKENDS, _fake)
