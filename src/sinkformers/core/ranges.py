"""Floating-point limits that several layers share. The kernels are given them with every call."""

import torch

SAFE_PRODUCT = {torch.float32: 1e30, torch.float64: 1e280}
"""A matrix is computed in the kernel domain while max u · max v stays below this.

That is far enough inside the dtype's range that entries of the kernel which were rounded to zero could not have
mattered. From below the product is bounded by itself, since rows sum to 1.
"""

SMALLEST_EXPONENT = {torch.float32: -87.0, torch.float64: -708.0}
"""exp is an exact zero from here on: denormal numbers slow a CPU down tenfold, and a floor would leak mass."""

BLOCK = 1024
"""The most terms of one sum in a matrix product.

BLAS adds them one after the other, and in float32 the rounding of 100,000 like terms adds up to nearly 1e-3 of their
sum.
"""


def masked_bias(dtype: torch.dtype) -> float:
    """A bias at or below this means masked.

    Hugging Face writes the lowest finite number for minus infinity, and column steps would divide it away.
    """
    return torch.finfo(dtype).min / 2
