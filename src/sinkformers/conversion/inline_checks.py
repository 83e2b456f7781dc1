"""What the flow of data in a module does not show of its attention, and is read from its class or a call's tensors."""

import dis
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Set
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sinkformers.conversion.inline_calls import SOFTMAX
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
    """Return whether a class calls attention as one function, in any method, as many do where it is available."""
    own = (base for base in kind.__mro__ if not f"{base.__module__}.".startswith("torch."))
    methods = [_function(method) for base in own for method in vars(base).values()]
    functions = [*(each for each in methods if each is not None), *_reached(kind)]
    return any(_FUSED.search(name) for each in functions for code in _codes(each) for name in code.co_names)


def has_softmax_elsewhere(kind: type[nn.Module], methods: Set[str]) -> bool:
    """Return whether `forward` leads to a SoftMax that is not in one of these methods, but in a function it calls."""
    known = [_function(getattr(kind, name)) for name in methods]
    return any(_calls_softmax(each) for each in _reached(kind) if each not in known)


def _calls_softmax(function: FunctionType) -> bool:
    names, attributes = _names(function)
    given = [each for name in names if callable(each := function.__globals__.get(name))]
    return bool({"softmax", "Softmax"} & (names | attributes)) or any(each in SOFTMAX for each in given)


@functools.cache
def _reached(kind: type[nn.Module]) -> tuple[FunctionType, ...]:
    """Return the functions that the `forward` of a class leads to by their names, methods and others."""
    forward = _function(kind.forward)
    found = [] if forward is None else [forward]
    methods = set(found)
    for function in found:  # which grows
        names, attributes = _names(function)
        objects = [function.__globals__.get(name) for name in names]
        modules = [each for each in objects if isinstance(each, ModuleType)]
        objects += [vars(module).get(name) for module in modules for name in attributes]
        own = [getattr(kind, name, None) for name in attributes] if function in methods else []
        methods.update(each for each in map(_function, own) if each is not None)
        found += dict.fromkeys(
            each for each in map(_function, [*own, *objects]) if each is not None and each not in found
        )
    return tuple(found)


def _function(given: Any) -> FunctionType | None:
    """Return a function in Python without its decorators; None for those of torch and of the standard library."""
    function = inspect.unwrap(given) if callable(given) and not isinstance(given, type) else None
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    known = sys.stdlib_module_names | {torch.__name__}
    return function if isinstance(function, FunctionType) and package not in known else None


def _codes(function: FunctionType) -> list[CodeType]:
    """Return the code of a function and of those inside of it."""
    codes = [function.__code__]
    for code in codes:  # which grows
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return codes


@functools.cache
def _names(function: FunctionType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals and those of attributes in the code of a function."""
    steps = [step for code in _codes(function) for step in dis.get_instructions(code)]
    names, attributes = (
        frozenset(step.argval for step in steps if step.opname in how)
        for how in (("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD"))
    )
    return names, attributes


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
