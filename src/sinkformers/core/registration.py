"""What every registered operator shares: full precision inside, vmap over a leading axis, no silent second derivative."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run with autocast off: inside an operator it would still turn products into half precision."""

    @functools.wraps(function)
    def guarded(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = first.device.type
        if not torch.is_autocast_enabled(device):
            return function(first, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(first, *args, **kwargs)

    return guarded


def register_vmap(operator: Any, *, seed: int | None = None) -> None:
    """Let `torch.vmap` add an axis in front: the operator takes any leading axes, so it serves the batch at once.

    Where the argument at place `seed` is given, every entry of the batch has a seed, and so a call, of its own.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        moved = [_lead(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True)]
        if seed is None or args[seed] is None:
            out = operator(*moved)
        else:
            each = [operator(*_entry(moved, index)) for index in range(info.batch_size)]
            out = tree_map(lambda *parts: torch.stack(parts), *each)
        return out, tree_map(lambda _: 0, out)

    operator.register_vmap(rule)


def _lead(arg: Any, dim: int | None, batch_size: int) -> Any:
    """The argument with its batch axis in front, a tensor without one repeated along it."""
    if not isinstance(arg, Tensor):
        return arg
    return arg.expand(batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)


def _entry(args: list[Any], index: int) -> list[Any]:
    return [arg[index] if isinstance(arg, Tensor) else arg for arg in args]


def refuse_second_derivative(operator: Any) -> None:
    """The gradient operators are exact but not differentiable; say so, and what is."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "sinkformers: the gradient of this backend cannot be differentiated once more. "
            'backend="reference" can: its gradient is made of torch\'s own operations.'
        )

    operator.register_autograd(refuse)
