"""Triton kernels: attention that streams over its scores, and Sinkhorn on very many tiny matrices."""

from sinkformers.kernels.triton.attention import attention_backward, attention_forward
from sinkformers.kernels.triton.tiny import tiny_backward, tiny_forward

__all__ = ["attention_backward", "attention_forward", "tiny_backward", "tiny_forward"]
