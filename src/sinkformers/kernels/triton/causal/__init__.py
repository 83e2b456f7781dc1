"""Causal attention by the streaming definition, as a chunked scan over blocks of rows."""

from sinkformers.kernels.triton.causal.attention import block_rows, causal_backward, causal_forward

__all__ = ["block_rows", "causal_backward", "causal_forward"]
