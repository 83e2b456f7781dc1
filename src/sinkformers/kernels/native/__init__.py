"""The compiled CPU kernels."""

from sinkformers.kernels.native.binding import (
    TINY,
    attention_backward,
    attention_forward,
    instruction_set,
    missing,
    operator_backward,
    operator_forward,
    release_workspace,
    smallest_exponent,
    unknown_fields,
    use_instruction_set,
)

__all__ = [
    "TINY",
    "attention_backward",
    "attention_forward",
    "instruction_set",
    "missing",
    "operator_backward",
    "operator_forward",
    "release_workspace",
    "smallest_exponent",
    "unknown_fields",
    "use_instruction_set",
]
