"""What the code of a module does not show of its attention, and is read from the tensors of a call."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sinkformers.core.modes import readable

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")
_PARTS = (1, 2, 3)  # queries, keys and values may come from one projection


def number_of_heads(module: nn.Module) -> int | None:
    """Return the number of heads that a module says it has, or None."""
    return next((value for name in _HEADS if isinstance(value := getattr(module, name, None), int)), None)


def among_features(module: nn.Module, scores: Tensor, added_up: int | None) -> str | None:
    """Return what a call is counted as that attends among channels or heads instead of tokens, or None.

    Channels have as many scores as heads have features, and add up tokens. Where there are as many tokens as that, the
    two cannot be told apart.

    Args:
        added_up: the number of features that the product for the scores adds up, if it is known.
    """
    n, heads = scores.shape[-1], number_of_heads(module)
    if scores.dim() > 3 and heads is not None and heads == n != scores.shape[-3]:
        return "call that attends among heads left SoftMax"
    numbers = {value for value in vars(module).values() if type(value) is int}
    widths = set(_widths(module, heads or 1))
    if added_up is not None and n in widths and added_up not in widths | numbers:
        return "call that attends among channels left SoftMax"
    return None


def _widths(module: nn.Module, heads: int) -> Iterator[int]:
    """Yield how many features a head may have, by the projections of the module."""
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            yield from (size // heads // parts for size in weight.shape[:2] for parts in _PARTS)


def changed(before: Tensor, after: Tensor) -> bool:
    """Return whether weights (…, n, m) were changed but by one factor for each matrix, as far as that can be read."""
    if not (readable(before) and readable(after)) or before.shape != after.shape or not before.numel():
        return before.shape != after.shape
    before, after = before.detach(), after.detach()
    largest = before.amax((-2, -1), keepdim=True).clamp_min(torch.finfo(before.dtype).tiny)
    factor = after.sum((-2, -1), keepdim=True) / before.sum((-2, -1), keepdim=True).clamp_min(largest)
    rounding = 16 * torch.finfo(before.dtype).eps
    scaled = factor * before
    return bool(((after - scaled).abs() > (1e-3 + rounding) * scaled.abs() + (1e-6 + rounding) * largest).any())
