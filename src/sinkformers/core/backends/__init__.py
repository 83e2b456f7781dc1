"""The backends of `sinkhorn`, one file each."""

from sinkformers.core.backends.native import Native
from sinkformers.core.backends.reference import Reference
from sinkformers.core.backends.torch import Torch
from sinkformers.core.backends.triton import Triton

__all__ = ["Native", "Reference", "Torch", "Triton"]
