"""The compiled CPU kernels."""

from sinkformers.kernels.native.binding import (
    DEFAULT_WORKSPACE,
    TINY,
    attention_backward,
    attention_fields,
    attention_forward,
    instruction_set,
    missing,
    one_thread,
    operator_backward,
    operator_forward,
    release_workspace,
    set_workspace_limit,
    smallest_exponent,
    use_instruction_set,
    workspace_limit,
)
from sinkformers.kernels.native.state import state_sizes

__all__ = [
    "DEFAULT_WORKSPACE",
    "TINY",
    "attention_backward",
    "attention_fields",
    "attention_forward",
    "instruction_set",
    "missing",
    "one_thread",
    "operator_backward",
    "operator_forward",
    "release_workspace",
    "set_workspace_limit",
    "smallest_exponent",
    "state_sizes",
    "use_instruction_set",
    "workspace_limit",
]
