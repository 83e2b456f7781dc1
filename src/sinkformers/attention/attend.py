"""`sinkformers::attend`: query, key and value to output as one operator, with its exact gradient as another.

Between forward and backward only vectors are saved, a few per step, beside inputs and output. The weights are
recomputed, and so is the dropout, from its seed.
"""

from sinkformers.attention.backends import Native, Reference, Torch, Triton
from sinkformers.attention.call import AttentionCall, AttentionResult
from sinkformers.core.backend import Backends
from sinkformers.core.operator import Operator
from sinkformers.core.problem import working_dtype
from sinkformers.core.state import empty_state

BACKENDS = Backends(Native(), Triton(), Torch(), Reference())


def _fake(call: AttentionCall, backend: str) -> AttentionResult:
    *lead, n, _ = call.query.shape
    out = call.query.new_empty(*lead, n, call.value.shape[-1], dtype=working_dtype(call.query.dtype))
    return AttentionResult(out, *empty_state(out, lead, n, call.key.shape[-2], call.definition()))


attend = Operator("attend", AttentionCall, AttentionResult, BACKENDS, _fake)
