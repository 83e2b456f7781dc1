"""Triton kernels: attention that streams over its scores, causal or not, and Sinkhorn on very many tiny matrices."""

from sinkformers.kernels.triton.attention import attention_backward, attention_forward
from sinkformers.kernels.triton.causal import block_rows, causal_backward, causal_forward
from sinkformers.kernels.triton.tiny import tiny_backward, tiny_forward

__all__ = [
    "attention_backward",
    "attention_forward",
    "block_rows",
    "causal_backward",
    "causal_forward",
    "tiny_backward",
    "tiny_forward",
]
