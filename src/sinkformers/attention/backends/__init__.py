"""The backends of attention, one file each."""

from sinkformers.attention.backends.native import Native
from sinkformers.attention.backends.reference import Reference
from sinkformers.attention.backends.torch import Torch
from sinkformers.attention.backends.triton import Triton

__all__ = ["Native", "Reference", "Torch", "Triton"]
