"""The backends of causal attention, one file each."""

from sinkformers.attention.causal.backends.native import Native
from sinkformers.attention.causal.backends.reference import Reference
from sinkformers.attention.causal.backends.torch import Torch
from sinkformers.attention.causal.backends.triton import Triton

__all__ = ["Native", "Reference", "Torch", "Triton"]
