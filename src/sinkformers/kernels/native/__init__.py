"""The compiled CPU kernels."""

from sinkformers.kernels.native.binding import (
    TINY,
    attention_backward,
    attention_fields,
    attention_forward,
    instruction_set,
    missing,
    operator_backward,
    operator_forward,
    release_workspace,
    smallest_exponent,
    use_instruction_set,
)
from sinkformers.kernels.native.state import state_sizes

__all__ = [
    "TINY",
    "attention_backward",
    "attention_fields",
    "attention_forward",
    "instruction_set",
    "missing",
    "operator_backward",
    "operator_forward",
    "release_workspace",
    "smallest_exponent",
    "state_sizes",
    "use_instruction_set",
]
