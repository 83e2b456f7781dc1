"""Tensors of one shape, lying in memory in different ways: expressions that make them."""

import math
from collections.abc import Callable, Sequence

LAYOUTS = (
    "plain",
    "transposed",
    "reversed",
    "heads_inside",
    "every_second_row",
    "every_second_feature",
    "inner",
    "misaligned",
    "flipped",
    "negative",
    "conjugate",
    "overlapping",
    "expanded_first",
    "expanded_rows",
    "expanded_features",
    "all_expanded",
)
# Several entries share one place in memory: nothing may be written into them.
SHARED = ("overlapping", "expanded_first", "expanded_rows", "expanded_features", "all_expanded")


def expression(shape: Sequence[int], layout: str, make: Callable[[Sequence[int]], str], *, is_complex: bool) -> str:
    """Python that makes a tensor of a shape in a layout; `make` gives the expression of a plain one.

    A layout that a shape does not have gives a plain tensor. `is_complex` says whether there is a complex dtype whose
    imaginary part the tensor can be.
    """
    shape = list(shape)
    rank = len(shape)
    if layout == "negative":
        return f"torch._neg_view({make(shape)})"
    if layout == "conjugate":
        if not is_complex:
            return f"torch._neg_view({make(shape)})"
        pairs = make([*shape, 2])
        return f"torch.view_as_complex({pairs}).conj().imag"
    if layout == "flipped" and rank:
        return f"{make(shape)}.flip(-1)"
    if layout == "misaligned":
        return f"{make([math.prod(shape) + 1])}[1:].view({_shown(shape)})"
    if layout == "inner" and rank:
        return f"{make([*shape[:-1], shape[-1] + 3])}[..., 2:-1]"
    if layout == "every_second_feature" and rank:
        return f"{make([*shape[:-1], 2 * shape[-1]])}[..., ::2]"
    if layout == "every_second_row" and rank > 1:
        return f"{make([*shape[:-2], 2 * shape[-2], shape[-1]])}[..., ::2, :]"
    if layout == "transposed" and rank > 1:
        return f"{make([*shape[:-2], shape[-1], shape[-2]])}.mT"
    if layout == "heads_inside" and rank > 2:
        return f"{make([*shape[:-3], shape[-2], shape[-3], shape[-1]])}.transpose(-3, -2)"
    if layout == "reversed" and rank > 1:
        return f"{make(shape[::-1])}.permute({_shown(range(rank - 1, -1, -1))})"
    if layout == "overlapping" and rank > 1 and min(shape[-2:]) > 0:
        return f"{make([*shape[:-2], shape[-2] + shape[-1] - 1])}.unfold(-1, {shape[-1]}, 1)"
    axes = {
        "expanded_first": [0],
        "expanded_rows": [rank - 2],
        "expanded_features": [rank - 1],
        "all_expanded": list(range(rank)),
    }.get(layout, [])
    if axes and rank > 1:
        return f"{make([1 if a in axes else size for a, size in enumerate(shape)])}.expand({_shown(shape)})"
    return make(shape)


def _shown(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) else "()"
