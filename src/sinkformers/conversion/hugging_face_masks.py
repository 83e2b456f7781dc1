"""Masks and biases of Hugging Face transformers as the arguments of `attend`."""

import math
from typing import Any

import torch
from torch import Tensor

from sinkformers.conversion.attend import allowed


def as_four_axes(mask: Any) -> Tensor | None:
    """Return a mask as (batch, heads or 1, n or 1, m); flash attention has masks (batch, m)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"sinkformers: the attention mask must be a tensor; got {type(mask).__name__}. Load the model with "
            'attn_implementation="sdpa" before converting it.'
        )
    if mask.dim() == 2:
        return mask.bool()[:, None, None, :]
    return mask if mask.is_floating_point() else mask.bool()


def masks_in_order(
    mask: Any, query: Tensor, key: Tensor, is_causal: bool, is_cross: bool, window: int | None
) -> dict[str, Any]:
    """Return the mask arguments of `attend` for a module that normalises rows in order.

    A mask with four axes says all: the triangle, a window, padding. Without one, or with padding alone (batch, m), the
    attention functions of transformers take the triangle and the window from the module. In self-attention the
    queries are the last tokens. One that no query may attend to is padding, which must not count in column sums.
    """
    four = as_four_axes(mask)
    if is_cross:
        return {"attn_mask": four}
    n, m = query.shape[-2], key.shape[-2]
    says_all = isinstance(mask, Tensor) and mask.dim() > 2
    options: dict[str, Any] = {"attn_mask": four, "is_causal": is_causal and not says_all and n > 1}
    if four is not None and n > 1 and four.shape[-1] == m:
        options["query_mask"] = allowed(four).any(-2)[..., m - n :]
    if options["is_causal"] and (four is not None or (window is not None and window < m)):
        near = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
        near = near if window is None else near.triu(m - n - window + 1)
        options |= {"attn_mask": near if four is None else near & four, "is_causal": False}
    return options


def with_bias(options: dict[str, Any], bias: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return arguments of `attend` with a bias added to the scores; a triangle becomes part of the mask."""
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        n, m = query.shape[-2], key.shape[-2]
        mask, options = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n), {**options}
        options["is_causal"] = False
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    return {**options, "attn_mask": bias}


def capped_scores(query: Tensor, key: Tensor, scale: float | None, cap: float, bias: Tensor | None) -> Tensor:
    """Return scores whose size is limited, cap · tanh(scores / cap), plus a bias."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = cap * torch.tanh((query @ key.mT) * (scale / cap))
    return scores if bias is None else scores + bias
