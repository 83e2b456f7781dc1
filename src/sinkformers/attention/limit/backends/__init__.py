"""The backends of attention at the limit, one file each."""

from sinkformers.attention.limit.backends.native import Native
from sinkformers.attention.limit.backends.torch import Torch

__all__ = ["Native", "Torch"]
