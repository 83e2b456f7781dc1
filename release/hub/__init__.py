"""Doubly stochastic attention in Triton: the function `sinkhorn_attention`, and the kernels that it is made of."""

from .attention import sinkhorn_attention
from .triton_kernels import *  # noqa: F403
from .triton_kernels import __all__ as _kernels

__all__ = ["sinkhorn_attention", *_kernels]
