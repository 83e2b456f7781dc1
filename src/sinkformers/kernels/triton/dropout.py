"""Dropout by counter: whether an entry is kept follows from the seed and its place alone.

No state and no order of evaluation is involved, so that the backward pass, another block size and another backend all
draw the same mask. `mix` is a 32-bit integer hash; all arithmetic is modulo 2³².
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Dropout(NamedTuple):
    seed: Any  # int64 scalar on the device; None where nothing is dropped
    threshold: int  # entries whose hash is smaller are dropped
    scale: float  # factor of the others, applied after summing: half precision need not hold it


def dropout(seed: Tensor | None, p: float) -> Dropout:
    return Dropout(seed, min(int(p * 2**32), 2**32 - 1), 0.0 if p == 1 else 1 / (1 - p))


@triton.jit
def mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def is_kept(dropout, head, i, j):
    """Which weights at rows `i` and columns `j` of a matrix are not dropped."""
    seed = tl.load(dropout.seed)
    key = mix(mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
    key = mix(key + head.to(tl.uint32) * 0x9E3779B9)
    row = mix(key + i.to(tl.uint32) * 0x85EBCA6B)
    bits = mix(row[:, None] + (j.to(tl.uint32) * 0xC2B2AE35)[None, :])
    return bits >= tl.cast(dropout.threshold, tl.uint32)
