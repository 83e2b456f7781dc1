"""Rotary positions (Su et al. 2021): queries and keys are rotated, so that scores depend on distances of tokens."""

import math

import torch
from torch import Tensor

BASE = 10_000.0


def check_rotary(caller: str, head_dim: int) -> None:
    if head_dim % 2:
        raise ValueError(
            f"{caller}: rotary positions rotate pairs of features, so heads must have an even size; got {head_dim}. "
            "Choose another head_dim, or learned positions."
        )


def rotated(heads: Tensor, first: int = 0) -> Tensor:
    """Return heads (…, n, d) rotated by their positions `first`, `first` + 1, …

    Features k and k + d/2 are a point of a plane, which is turned by position · 10,000^(−2k/d) radians.

    Examples:
        >>> import torch
        >>> from sinkformers.modules.rotary import rotated
        >>> q, k = torch.randn(2, 5, 8, dtype=torch.float64).unbind()
        >>> here, there = (rotated(q, at) @ rotated(k, at).mT for at in (0, 100))
        >>> torch.allclose(here, there)
        True
    """
    n, d = heads.shape[-2:]
    wide = torch.float64 if heads.device.type != "mps" else torch.float32  # positions may be large
    rates = torch.exp(torch.arange(d // 2, device=heads.device, dtype=wide) * (-2 * math.log(BASE) / d))
    angles = torch.arange(first, first + n, device=heads.device, dtype=wide)[:, None] * rates
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    a, b = heads.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
