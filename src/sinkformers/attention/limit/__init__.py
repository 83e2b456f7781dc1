"""Attention at the limit of Sinkhorn's algorithm, `n_iters=math.inf`."""

from sinkformers.attention.limit.call import LimitAttentionCall, LimitAttentionResult
from sinkformers.attention.limit.operator import BACKENDS, attend_limit

__all__ = ["BACKENDS", "LimitAttentionCall", "LimitAttentionResult", "attend_limit"]
