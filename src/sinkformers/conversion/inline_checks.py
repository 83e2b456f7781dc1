"""What the flow of data in a module does not show of its attention, and is read from its class or a call's tensors."""

import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers.core.modes import readable

_FUSED = re.compile(
    r"scaled_dot_product_attention|flash_attn|flash_attention|flex_attention|memory_efficient_attention"
)

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")
_PARTS = (1, 2, 3)  # queries, keys and values may come from one projection


def number_of_heads(module: nn.Module) -> int | None:
    """Return the number of heads that a module says it has, or None."""
    return next((value for name in _HEADS if isinstance(value := getattr(module, name, None), int)), None)


@functools.cache
def may_be_fused(kind: type[nn.Module]) -> bool:
    """Return whether a method of a class calls attention as one function, as many do where it is available."""
    own = (base for base in kind.__mro__ if not f"{base.__module__}.".startswith("torch."))
    methods = [method for base in own for method in vars(base).values() if callable(method)]
    codes: list[Any] = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    for code in codes:  # which grows
        if code is not None:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return any(_FUSED.search(name) for code in codes if code is not None for name in code.co_names)


def among_features(module: nn.Module, scores: Tensor, added_up: int | None) -> str | None:
    """Return what a call is counted as that attends among channels or heads instead of tokens, or None.

    Heads have as many features in all as a projection; so have tokens that are taken for heads. Channels have as many
    scores as heads have features, and add up tokens. Where there are as many tokens as that, they cannot be told apart.

    Args:
        added_up: the number of features that the product for the scores adds up, if it is known.
    """
    n, heads = scores.shape[-1], number_of_heads(module)
    numbers = {value for value in vars(module).values() if type(value) is int}
    widths = set(_widths(module, heads or 1))
    if added_up is not None and n in widths and added_up not in widths | numbers:
        return "call that attends among channels left SoftMax"
    if scores.dim() > 3:
        one, two = (added_up or 0) * n, (added_up or 0) * scores.shape[-3]
        wide = one in set(_widths(module, 1)) and two not in set(_widths(module, 1, (*_PARTS, 4)))
        if heads == n != scores.shape[-3] or wide:
            return "call that attends among heads left SoftMax"
    return None


def _widths(module: nn.Module, heads: int, among: tuple[int, ...] = _PARTS) -> Iterator[int]:
    """Yield how many features a head may have, by the projections of the module."""
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            yield from (
                size // (heads * parts) for size in weight.shape[:2] for parts in among if size % (heads * parts) == 0
            )


def has_projections(module: nn.Module) -> bool:
    """Return whether a module projects anything, so that it is known how many features its tokens have."""
    return any(parameter.dim() > 1 for parameter in module.parameters())


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
