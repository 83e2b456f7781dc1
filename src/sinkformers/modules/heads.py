"""Tokens (…, n, heads·d) as heads (…, heads, n, d), and back."""

from torch import Tensor


def head_width(caller: str, dim: int, num_heads: int, head_dim: int | None) -> int:
    """`head_dim`, or the equal share of `dim` where it is not given."""
    if head_dim is None and dim % num_heads:
        raise ValueError(
            f"{caller}: num_heads must divide dim, or head_dim be given; got num_heads={num_heads}, dim={dim}."
        )
    return head_dim or dim // num_heads


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def join_heads(heads: Tensor) -> Tensor:
    return heads.transpose(-3, -2).flatten(-2)
