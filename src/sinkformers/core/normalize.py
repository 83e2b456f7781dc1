"""`sinkformers::normalize`: scores to weights as one operator, with its exact gradient as another."""

import torch

from sinkformers.core.backend import Backends
from sinkformers.core.backends import Native, Reference, Torch, Triton
from sinkformers.core.call import NormalizeBackend, NormalizeCall, NormalizeResult
from sinkformers.core.operator import Operator
from sinkformers.core.problem import working_dtype
from sinkformers.core.state import empty_state, no_state

BACKENDS = Backends(Native(), Triton(), Torch(), Reference())


def _fake(call: NormalizeCall, backend: str) -> NormalizeResult:
    *lead, n, m = call.scores.shape
    weights = torch.empty_like(call.scores, memory_format=torch.contiguous_format)
    like, chosen = weights.new_empty(0, dtype=working_dtype(weights.dtype)), BACKENDS[backend]
    assert isinstance(chosen, NormalizeBackend)
    if chosen.keeps_state(call):
        return NormalizeResult(weights, *empty_state(like, lead, n, m, call.definition()))
    return NormalizeResult(weights, *no_state(like, lead, n, m))


normalize = Operator("normalize", NormalizeCall, NormalizeResult, BACKENDS, _fake)
