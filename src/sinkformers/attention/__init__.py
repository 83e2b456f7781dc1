"""Functional attention with the signature and the conventions of `F.scaled_dot_product_attention`."""

from sinkformers.attention.functional import attention_with_weights, backend_for, sinkhorn_attention

__all__ = ["attention_with_weights", "backend_for", "sinkhorn_attention"]
