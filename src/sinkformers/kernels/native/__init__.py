"""The compiled CPU kernels."""

from sinkformers.kernels.native.binding import (
    attention_backward,
    attention_forward,
    instruction_set,
    missing,
    release_workspace,
    use_instruction_set,
)

__all__ = [
    "attention_backward",
    "attention_forward",
    "instruction_set",
    "missing",
    "release_workspace",
    "use_instruction_set",
]
