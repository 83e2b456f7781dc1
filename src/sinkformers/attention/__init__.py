"""Functional attention with the signature and the conventions of `F.scaled_dot_product_attention`."""

from sinkformers.attention.causal import CacheLayer, SinkhornCache
from sinkformers.attention.functional import backend_for, sinkhorn_attention
from sinkformers.attention.tune import Tuning, tune
from sinkformers.attention.with_weights import attention_with_weights

__all__ = [
    "CacheLayer",
    "SinkhornCache",
    "Tuning",
    "attention_with_weights",
    "backend_for",
    "sinkhorn_attention",
    "tune",
]
