"""Register functions with torch as operators, and give them gradients.

`torch.library.custom_op` would import torch's compiler, which takes a second, at its first call; the functions here
register with the dispatcher directly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sinkformers.core.modes import in_forward_mode, intercepted

_LIBRARIES = vars(torch.ops).setdefault("_sinkformers_libraries", {})
"""What holds each operator, by its name; kept by torch, so that importing once more replaces it, as in notebooks."""


def library_of(operator: Any) -> torch.library.Library:
    return _LIBRARIES[operator.name()]


def define(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None,
    *,
    schema: str | None = None,
    mutates: tuple[str, ...] = (),
) -> Any:
    """Register a function as `sinkformers::name`, and return the operator.

    Args:
        fake: returns empty tensors of the shapes that the function returns; None for a function that returns nothing.
        schema: arguments and results in torch's schema language; read from the annotations where it is not given.
        mutates: the arguments that the function writes to.
    """
    schema = schema or torch.library.infer_schema(function, mutates_args=mutates)
    full_name = f"sinkformers::{name}"
    if full_name in _LIBRARIES:
        _LIBRARIES.pop(full_name)._destroy()
    library = _LIBRARIES[full_name] = torch.library.Library("sinkformers", "FRAGMENT")
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(full_name, fake or (lambda *args: None), lib=library)
    return getattr(torch.ops.sinkformers, name).default


def register_vmap(operator: Any, shared: Callable[[tuple[Any, ...]], bool] = lambda args: False) -> None:
    """Let `torch.vmap` add an axis in front: the operator takes any leading axes, so it serves the batch at once.

    Where `shared(args)` says that a tensor without leading axes is among them, each entry of the batch is a call of its
    own.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        moved = [_lead(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True)]
        if not shared(args):
            out = operator(*moved)
        else:
            each = [operator(*_entry(moved, index)) for index in range(info.batch_size)]
            out = tree_map(lambda *parts: torch.stack(parts), *each)
        return out, tree_map(lambda _: 0, out)

    torch.library.register_vmap(operator, rule, lib=library_of(operator))


def _lead(arg: Any, dim: Any, batch_size: int) -> Any:
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


def autograd_function(operator: Any, **methods: Callable[..., Any]) -> Any:
    """A subclass of `autograd.Function` with these methods, named for an operator."""
    static = {name: staticmethod(method) for name, method in methods.items()}
    return type(operator.name().partition("::")[2], (torch.autograd.Function,), static)


def differentiable(
    operator: Any,
    function: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    jvp: Callable[..., Any] = _no_forward_mode,
    *,
    tensors_at: Sequence[int] = (0,),
) -> Callable[..., Any]:
    """Give an operator its gradient, and return the function to call. `tensors_at` are the places of its tensors.

    The formula is registered with the operator, which is what tracing sees. `torch.func` supports `autograd.Function`
    only, so that the operator is wrapped in one as well. A call that nothing intercepts runs the function directly: the
    dispatcher would take as long as small attention itself.
    """
    torch.library.register_autograd(operator, backward, setup_context=setup_context, lib=library_of(operator))

    def forward(ctx: Any, *args: Any) -> Any:
        output = function(*args)
        setup_context(ctx, args, output)
        return output

    direct = autograd_function(operator, forward=forward, backward=backward)
    transformed = autograd_function(operator, forward=operator, setup_context=setup_context, backward=backward, jvp=jvp)
    transformed.generate_vmap_rule = True

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            if in_forward_mode():  # a registered operator would drop the tangents silently
                _no_forward_mode(None)
            return operator(*args)
        tensors = [args[at] for at in tensors_at if args[at] is not None]
        if intercepted(tensors):
            return transformed.apply(*args)
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return direct.apply(*args) if needed else function(*args)

    return call


def not_differentiable(operator: Any, function: Callable[..., Any], *, tensors_at: Sequence[int]) -> Callable[..., Any]:
    """The function to call for an operator that has no gradient of its own; differentiating it raises."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "sinkformers: this gradient cannot be differentiated again. That of sinkhorn and sinkhorn_attention "
            'with backend="reference" can: it consists of torch\'s own operations.'
        )

    return differentiable(operator, function, lambda ctx, inputs, output: None, refuse, tensors_at=tensors_at)


class _NotDifferentiable(torch.autograd.Function):
    """A gradient as it is, that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "sinkformers: the gradient of torch's fused SoftMax attention (n_iters=1 or tau=0) cannot be "
            'differentiated again. That of sinkhorn_attention with backend="reference" can.'
        )


def explain_second_derivative(output: Tensor) -> None:
    """Replace torch's error for a missing second derivative by one that says what to do; otherwise do nothing."""

    def mark(gradients: Any, _: Any) -> Any:
        # Gradients are only differentiated with create_graph=True; under `torch.func` torch's own error appears.
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            missing = "torch::autograd::NotImplemented"
            return tuple(
                g if g is None or g.grad_fn is None or g.grad_fn.name() != missing else _NotDifferentiable.apply(g)
                for g in gradients
            )

    if not torch.compiler.is_compiling() and output.grad_fn is not None:
        output.grad_fn.register_hook(mark)
