"""Triton kernels: attention that streams over its scores, and Sinkhorn on very many tiny matrices."""

from sinkformers.kernels.triton.attention import attention_backward, attention_forward

__all__ = ["attention_backward", "attention_forward"]
