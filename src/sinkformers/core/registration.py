"""What registered operators share: full precision inside, vmap over a leading axis, no silent second derivative."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map


def full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run with autocast off: inside an operator it would still turn products into half precision."""

    @functools.wraps(function)
    def guarded(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        with without_autocast(first.device):
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


def _no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(
        "sinkformers: there is no forward-mode derivative here (jvp, jacfwd); reverse mode (backward, vjp, jacrev) "
        'there is. sinkhorn and sinkhorn_attention with backend="reference" have both.'
    )


def differentiable(
    operator: Any,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    jvp: Callable[..., Any] = _no_forward_mode,
) -> Callable[..., Any]:
    """Give an operator its gradient, and return what to call.

    The formula is registered with the operator, which is what tracing sees. `torch.func` goes through
    `autograd.Function` only, so it is wrapped in one as well. A call that nobody watches runs the operator's body at
    once: torch's way to it costs as much as small attention itself.
    """
    operator.register_autograd(backward, setup_context=setup_context)
    body = getattr(operator, "_init_fn", operator)

    def forward(ctx: Any, *args: Any) -> Any:
        output = body(*args)
        setup_context(ctx, args, output)
        return output

    def function(**parts: Any) -> Any:
        return type(operator._name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in parts.items()})

    direct = function(forward=forward, backward=backward)
    transformed = function(forward=operator, setup_context=setup_context, backward=backward, jvp=jvp)
    transformed.generate_vmap_rule = True

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            if forward_ad._current_level >= 0:  # a registered operator would drop the tangents without a word
                _no_forward_mode(None)
            return operator(*args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if _watched(tensors):
            return transformed.apply(*args)
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return direct.apply(*args) if wanted else body(*args)

    return call


_PLAIN = (Tensor, torch.nn.Parameter)


def _watched(tensors: list[Tensor]) -> bool:
    """Whether a transform, a mode, the profiler or a kind of tensor has a say in what an operator does."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        or any(type(tensor) not in _PLAIN or tensor.is_meta for tensor in tensors)
    )


def not_differentiable(operator: Any) -> Callable[..., Any]:
    """The gradient operators are exact but have no gradient themselves; say so, and what has."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "sinkformers: this gradient cannot be differentiated once more. That of sinkhorn and sinkhorn_attention "
            'with backend="reference" can: it is made of torch\'s own operations.'
        )

    return differentiable(operator, lambda ctx, inputs, output: None, refuse)


class _Last(torch.autograd.Function):
    """A gradient as it is, that cannot be differentiated once more."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "sinkformers: the gradient of torch's fused SoftMax attention (n_iters=1 or tau=0) cannot be "
            'differentiated once more. That of sinkhorn_attention with backend="reference" can.'
        )


def explain_second_derivative(output: Tensor) -> None:
    """Say what to do instead, where the gradient of an output of torch's has no derivative; otherwise do nothing."""

    def mark(gradients: Any, _: Any) -> Any:
        # Gradients are only differentiated with create_graph=True; under `torch.func` torch speaks for itself.
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            missing = "torch::autograd::NotImplemented"
            return tuple(
                g if g is None or g.grad_fn is None or g.grad_fn.name() != missing else _Last.apply(g)
                for g in gradients
            )

    if not torch.compiler.is_compiling() and output.grad_fn is not None:
        output.grad_fn.register_hook(mark)


def readable(tensor: Tensor) -> bool:
    """Whether Python may branch on values: not while traced, nor under `torch.func`, nor on `meta`, nor if fake."""
    under_func = torch._C._are_functorch_transforms_active()
    return not (torch.compiler.is_compiling() or under_func or tensor.is_meta or isinstance(tensor, FakeTensor))


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device; False for one that has none, such as `meta`."""
    return _has_autocast(device.type) and torch.is_autocast_enabled(device.type)


@torch.compiler.assume_constant_result  # Dynamo of older releases cannot trace it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()
