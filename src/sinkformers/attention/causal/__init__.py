"""Causal attention by the streaming definition: rows are normalised in order, columns by what they have received."""

from sinkformers.attention.causal.cache import CacheLayer, ColumnSums, SinkhornCache
from sinkformers.attention.causal.call import CausalAttentionCall, CausalAttentionResult
from sinkformers.attention.causal.operator import BACKENDS, attend_causal

__all__ = [
    "BACKENDS",
    "CacheLayer",
    "CausalAttentionCall",
    "CausalAttentionResult",
    "ColumnSums",
    "SinkhornCache",
    "attend_causal",
]
