"""`sinkformers::attend_causal`: query, key and value to the output of causal attention, with its exact gradient."""

import torch

from sinkformers.attention.causal.backends import Native, Reference, Torch, Triton
from sinkformers.attention.causal.call import CausalAttentionCall, CausalAttentionResult
from sinkformers.core.backend import Backends
from sinkformers.core.operator import Operator
from sinkformers.core.problem import working_dtype

BACKENDS = Backends(Native(), Triton(), Torch(), Reference())


def _fake(call: CausalAttentionCall, backend: str) -> CausalAttentionResult:
    (*lead, n, _), m, steps = call.query.shape, call.key.shape[-2], call.definition().col_steps()
    out = call.query.new_empty(*lead, n, call.value.shape[-1], dtype=working_dtype(call.query.dtype))
    received, expected = out.new_empty(*lead, steps, m), out.new_empty(*lead, m)
    starts = out.new_empty(*lead, (n + call.block - 1) // call.block, steps, m)
    return CausalAttentionResult(out, received, expected, starts, out.new_empty(lead, dtype=torch.bool))


attend_causal = Operator("attend_causal", CausalAttentionCall, CausalAttentionResult, BACKENDS, _fake)
