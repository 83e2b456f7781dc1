"""An operator and its gradient, registered from the description of its call and the table of its backends."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from sinkformers.core.backend import Backend, Backends
from sinkformers.core.description import Description, Field, describe, picker
from sinkformers.core.modes import autocasts, intercepted, requires_grad, saved_tensors_are_hooked, without_autocast
from sinkformers.core.registration import (
    autograd_function,
    define,
    differentiable,
    library_of,
    not_differentiable,
    register_vmap,
)


class Operator:
    """`sinkformers::name` and `sinkformers::name_backward`.

    Call and result are named tuples, annotated as in `core.description`. The first field of the result is the output,
    (..., n, e) or (..., n, m), the only one that has a gradient.

    Flat, as torch sees it, a call is `(*call, backend, revision)`, and one of the gradient is
    `(*saved tensors of the call, *its settings, backend, revision, *saved tensors of the result, d_output, needed)`,
    with one flag per field that has a gradient; it returns one tensor for each of them. A field that is not saved and
    has a gradient has the shape of the output.

    Args:
        fake: the result of a call, as empty tensors. Also given the name of the backend.
    """

    def __init__(
        self, name: str, call: Any, result: Any, backends: Backends, fake: Callable[[Any, str], tuple[Tensor, ...]]
    ) -> None:
        self.call, self.result, self.backends, self._fake = describe(call), describe(result), backends, fake
        backward = _Backward(self.call, self.result)
        self._layout = backward
        self._forward_operator = define(
            name,
            self._forward,
            self._forward_fake,
            schema=_schema([field.schema() for field in self.call.fields] + _CHOICE, len(self.result.fields)),
        )
        self._backward_operator = define(
            f"{name}_backward",
            self._backward,
            self._backward_fake,
            schema=_schema(backward.arguments, len(self.call.gradients)),
        )
        shared = [at for at, field in enumerate(self.call.fields) if _is_shared(field)]
        saved_shared = [at for at, field in enumerate(self.call.saved) if _is_shared(field)]
        register_vmap(self._forward_operator, lambda args: any(args[at] is not None for at in shared))
        register_vmap(self._backward_operator, lambda args: any(args[at] is not None for at in saved_shared))
        _decompose(self._forward_operator, self._traced_forward)
        _decompose(self._backward_operator, self._traced_backward)
        self._gradient = not_differentiable(self._backward_operator, self._backward, tensors_at=backward.tensors_at)
        tensors_at = [at for at, field in enumerate(self.call.fields) if field.role is not None]
        self._tensors_of = picker(tensors_at)
        self._apply = differentiable(
            self._forward_operator, self._forward, self._save, self._differentiate, tensors_at=tensors_at
        )
        self._eager = autograd_function(
            self._forward_operator, forward=self._record, backward=self._differentiate_recorded
        )

    def __call__(self, call: Any, backend: Backend) -> Any:
        """The result of a call, differentiable."""
        if torch.compiler.is_compiling():
            return self.result.kind(*self._apply(*call, backend.name, backend.revision()))
        tensors = self._tensors_of(call)
        if intercepted(tensors) or (torch.is_grad_enabled() and requires_grad(tensors)):
            return self.result.kind(*self._apply(*call, backend.name, ""))
        return _in_full_precision(call[0].device, backend.forward, call)  # nothing to record: the shortest way

    def output(self, call: Any, backend: Backend) -> Tensor:
        """The output of a call, differentiable; the shortest way where nothing intercepts it.

        All fields that have a gradient must be saved.
        """
        if torch.compiler.is_compiling():
            return self(call, backend)[0]
        tensors = self._tensors_of(call)
        if intercepted(tensors):
            return self(call, backend)[0]
        if not (torch.is_grad_enabled() and requires_grad(tensors)):
            return _in_full_precision(call[0].device, backend.forward_eager, call)[0]
        if saved_tensors_are_hooked():  # hooks, and with them checkpoints, see what the operator describes
            return self(call, backend)[0]
        return self._eager.apply(backend, call, *self._layout.gradients_of(call))

    def _record(self, ctx: Any, backend: Backend, call: Any, *given: Tensor | None) -> Tensor:
        """Compute an eager call, and save what its gradient needs; `given` are the fields that have one."""
        layout = self._layout
        result = _in_full_precision(call[0].device, backend.forward_eager, call)
        result = [None if part is None else part.contiguous() for part in result]
        ctx.settings = (*layout.settings_of(call), backend.name, "")
        ctx.save_for_backward(*layout.saved_of(call), *layout.results_of(result))
        ctx.set_materialize_grads(False)
        return result[0]  # pyright: ignore[reportReturnType]

    def _differentiate_recorded(self, ctx: Any, d_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_output is None:
            return (None,) * len(ctx.needs_input_grad)
        saved, (_, _, *needed) = ctx.saved_tensors, ctx.needs_input_grad
        args = self._layout.flatten(saved, ctx.settings, d_output, needed)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or intercepted((d_output, *saved)):
            found = self._gradient(*self._describe(args))
            return None, None, *[grad if is_needed else None for grad, is_needed in zip(found, needed, strict=True)]
        return None, None, *self._run_backward(args)

    def _read(self, args: tuple[Any, ...]) -> tuple[Any, str, str]:
        *call, backend, revision = args
        return self.call.kind(*call), backend, revision

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        call, backend, _ = self._read(args)
        return self._run(call, self.backends[backend])

    def _run(self, call: Any, backend: Backend) -> tuple[Tensor, ...]:
        return tuple([part.contiguous() for part in _in_full_precision(call[0].device, backend.forward, call)])

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        call, backend, _ = self._read(args)
        return tuple(self._fake(call, backend))

    def _traced_forward(self, *args: Any) -> Callable[[], Any] | None:
        call, name, revision = self._read(args)
        backend = self.backends[name].traced(call) if revision else None
        return None if backend is None else lambda: self._run(call, backend)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        layout = self._layout
        ctx.settings = [inputs[at] for at in layout.settings_at]
        ctx.save_for_backward(*[inputs[at] for at in layout.saved_at], *[output[at] for at in layout.results_at])
        given = [inputs[at] for at in layout.gradients_at]
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in given]
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, d_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
        layout = self._layout
        grads: list[Tensor | None] = [None] * (len(self.call.fields) + len(_CHOICE))
        if d_output is None:
            return tuple(grads)
        saved = ctx.saved_tensors  # read once: checkpointing allows no more
        needed = [ctx.needs_input_grad[at] for at in layout.gradients_at]
        args = layout.flatten(saved, ctx.settings, d_output, needed)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or intercepted((d_output, *saved)):
            found = self._gradient(*args)
        else:  # nothing to record: the shortest way
            found = self._run_backward(args)
        for at, grad, dtype, is_needed in zip(layout.gradients_at, found, ctx.dtypes, needed, strict=True):
            if is_needed and dtype is not None and grad is not None:
                grads[at] = grad.to(dtype)
        return tuple(grads)

    def _describe(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The flat arguments of a gradient whose result is one of `forward_eager`, as the operator takes them."""
        call, name, _, result, d_output, _ = self._layout.read(args)
        described = self.backends[name].described(call, result)
        parts = self._layout.results_of(described)
        return (*args[: -2 - len(parts)], *parts, d_output, args[-1])

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        return _without_none(self._run_backward(args), args)

    def _run_backward(self, args: tuple[Any, ...], traced: Backend | None = None) -> list[Tensor | None]:
        call, name, _, result, d_output, needed = self._layout.read(args)
        backend = self.backends[name] if traced is None else traced
        grads = _in_full_precision(d_output.device, backend.backward, call, result, d_output, needed)
        return [
            _finish(field, call, grads, d_output, needed) if needed[field.name] else None
            for field in self.call.gradients
        ]

    def _backward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        call, _, _, _, d_output, needed = self._layout.read(args)
        return _without_none([_finish(field, call, {}, d_output, needed) for field in self.call.gradients], args)

    def _traced_backward(self, *args: Any) -> Callable[[], Any] | None:
        call, name, revision, *_ = self._layout.read(args)
        backend = self.backends[name].traced(call) if revision else None
        return None if backend is None else lambda: _without_none(self._run_backward(args, backend), args)


class _Backward:
    """The flat arguments of a gradient operator, and where its inputs stand among those of the operator."""

    def __init__(self, call: Description, result: Description) -> None:
        self.call, self.result = call, result
        places = {field.name: at for at, field in enumerate(call.fields)}
        self.saved_at = [places[field.name] for field in call.saved]
        self.gradients_at = [places[field.name] for field in call.gradients]
        settings_at = [places[field.name] for field in call.settings]
        self.settings_at = [*settings_at, *range(len(places), len(places) + len(_CHOICE))]
        self.results_at = [at for at, field in enumerate(result.fields) if field in result.saved]
        self.saved_of, self.gradients_of = picker(self.saved_at), picker(self.gradients_at)
        self.settings_of, self.results_of = picker(settings_at), picker(self.results_at)
        self.gradients = [field.name for field in call.gradients]
        given = [field.schema() for field in (*call.saved, *call.settings)]
        results = [field.schema() for field in result.saved]
        self.arguments = [*given, *_CHOICE, *results, "Tensor d_output", "bool[] needed"]
        order = {argument.split()[1]: at for at, argument in enumerate([*given, *_CHOICE])}
        self._call_of = picker([order.get(field.name, -1) for field in call.fields])
        after = {argument.split()[1]: len(order) + at for at, argument in enumerate(results)}
        self._result_of = picker([after.get(field.name, -1) for field in result.fields])
        self._choice_at = len(given)
        self.tensors_at = [at for at, argument in enumerate(self.arguments) if argument.startswith("Tensor")]

    def flatten(self, saved: Any, settings: Any, d_output: Tensor, needed: list[bool]) -> tuple[Any, ...]:
        """The flat arguments, from what was saved of a call and its result."""
        count = len(self.saved_at)
        return (*saved[:count], *settings, *saved[count:], d_output, needed)

    def read(self, args: tuple[Any, ...]) -> tuple[Any, str, str, Any, Tensor, dict[str, bool]]:
        """Call, backend, revision, result, the gradient of the output, and which gradients are needed."""
        d_output, needed = args[-2:]
        backend, revision = args[self._choice_at], args[self._choice_at + 1]
        args = (*args, None)  # what is not saved is read from the end
        call, result = self.call.kind(*self._call_of(args)), self.result.kind(*self._result_of(args))
        return call, backend, revision, result, d_output, dict(zip(self.gradients, needed, strict=True))


_CHOICE = ["str backend", "str revision"]


def _in_full_precision(device: torch.device, method: Callable[..., Any], *args: Any) -> Any:
    """Call a backend's method with autocast off; a context costs microseconds where there is nothing to switch off."""
    if not autocasts(device):
        return method(*args)
    with without_autocast(device):
        return method(*args)


def _is_shared(field: Field) -> bool:
    return field.role is not None and field.role.axes is None


def _finish(
    field: Field, call: Any, grads: dict[str, Tensor | None], d_output: Tensor, needed: dict[str, bool]
) -> Tensor | None:
    """A gradient in the shape and dtype of its field; None where it is not needed."""
    grad, value = grads.get(field.name), getattr(call, field.name)
    if not needed[field.name] or (value is None and field.optional):
        return None
    if grad is None:
        return torch.zeros_like(d_output if value is None else value, memory_format=torch.contiguous_format)
    if value is not None and grad.shape != value.shape:
        grad = grad.sum_to_size(value.shape)
    if value is not None and (grad.dtype != value.dtype or grad.device != value.device):
        grad = grad.to(value)
    return grad.contiguous()


def _without_none(grads: list[Tensor | None], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The gradients with zeros, one per matrix, in the place of None, which an operator cannot return."""
    *_, d_output, _ = args
    return tuple([d_output.new_zeros(d_output.shape[:-2]) if grad is None else grad for grad in grads])


def _schema(arguments: list[str], results: int) -> str:
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"


def _decompose(operator: Any, traced: Callable[..., Callable[[], Any] | None]) -> None:
    """Let compiled graphs hold the operations of a backend's traced form instead of the operator.

    That happens below autograd, so that what is saved for backward stays what the operator saves. An exported program
    keeps the operator.
    """

    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = None if mode.export else traced(*args)
        if run is None:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return run()

    torch.library.register_torch_dispatch(operator, FunctionalTensorMode, rule, lib=library_of(operator))
