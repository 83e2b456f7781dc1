"""An operator and its gradient, registered from the description of its call and the table of its backends."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from sinkformers.core.backend import Backend, Backends
from sinkformers.core.description import Field, describe
from sinkformers.core.modes import without_autocast
from sinkformers.core.registration import LIBRARY, define, differentiable, not_differentiable, register_vmap


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
        arguments = [field.schema() for field in self.call.fields]
        kept = [field.schema() for field in (*self.call.saved, *self.call.settings)]
        kept_results = [field.schema() for field in self.result.saved]
        chosen = ["str backend", "str revision"]
        self.forward_operator = define(
            name, self._forward, self._forward_fake, schema=_schema(arguments + chosen, len(self.result.fields))
        )
        self.backward_operator = define(
            f"{name}_backward",
            self._backward,
            self._backward_fake,
            schema=_schema(
                [*kept, *chosen, *kept_results, "Tensor d_output", "bool[] needed"], len(self.call.gradients)
            ),
        )
        shared = [at for at, field in enumerate(self.call.fields) if field.role and field.role.axes is None]
        saved_shared = [at for at, field in enumerate(self.call.saved) if field.role and field.role.axes is None]
        register_vmap(self.forward_operator, lambda args: any(args[at] is not None for at in shared))
        register_vmap(self.backward_operator, lambda args: any(args[at] is not None for at in saved_shared))
        _decompose(self.forward_operator, self._traced_forward)
        _decompose(self.backward_operator, self._traced_backward)
        self._gradient = not_differentiable(self.backward_operator, self._backward)
        self._apply = differentiable(self.forward_operator, self._forward, self._save, self._differentiate)

    def __call__(self, call: Any, backend: Backend) -> Any:
        """The result of a call, differentiable."""
        revision = backend.revision() if torch.compiler.is_compiling() else ""
        return self.result.kind(*self._apply(*call, backend.name, revision))

    def _read(self, args: tuple[Any, ...]) -> tuple[Any, str, str]:
        *call, backend, revision = args
        return self.call.kind(*call), backend, revision

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        call, backend, _ = self._read(args)
        return self._run(call, self.backends[backend])

    def _run(self, call: Any, backend: Backend) -> tuple[Tensor, ...]:
        with without_autocast(call[0].device):
            return tuple(part.contiguous() for part in backend.forward(call))

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        call, backend, _ = self._read(args)
        return tuple(self._fake(call, backend))

    def _traced_forward(self, *args: Any) -> Callable[[], Any] | None:
        call, name, revision = self._read(args)
        backend = self.backends[name].traced(call) if revision else None
        return None if backend is None else lambda: self._run(call, backend)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *ctx.backend = self._read(inputs)
        result = self.result.kind(*output)
        ctx.settings = [getattr(call, field.name) for field in self.call.settings]
        tensors = [getattr(call, field.name) for field in self.call.saved]
        ctx.save_for_backward(*tensors, *(getattr(result, field.name) for field in self.result.saved))
        ctx.dtypes = [getattr(getattr(call, field.name), "dtype", None) for field in self.call.gradients]
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, d_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
        absent = (None, None)  # for backend and revision
        asked = dict(zip((field.name for field in self.call.fields), ctx.needs_input_grad, strict=False))
        if d_output is None:
            return *(None for _ in self.call.fields), *absent
        saved, count = ctx.saved_tensors, len(self.call.saved)  # read once: checkpointing allows no more
        tensors, results = saved[:count], saved[count:]
        needed = [asked[field.name] for field in self.call.gradients]
        found = self._gradient(*tensors, *ctx.settings, *ctx.backend, *results, d_output, needed)
        grads = {
            field.name: grad.to(dtype)
            for field, grad, dtype, is_needed in zip(self.call.gradients, found, ctx.dtypes, needed, strict=True)
            if is_needed and dtype is not None
        }
        return *(grads.get(field.name) for field in self.call.fields), *absent

    def _read_backward(self, args: tuple[Any, ...]) -> tuple[Any, str, str, Any, Tensor, dict[str, bool]]:
        parts = iter(args)
        tensors = {field.name: next(parts) for field in self.call.saved}
        call = self.call.rebuild(tensors, tuple(next(parts) for _ in self.call.settings))
        backend, revision = next(parts), next(parts)
        result = self.result.rebuild({field.name: next(parts) for field in self.result.saved})
        d_output, needed = parts
        names = (field.name for field in self.call.gradients)
        return call, backend, revision, result, d_output, dict(zip(names, needed, strict=True))

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        call, backend, _, result, d_output, needed = self._read_backward(args)
        return self._run_backward(call, self.backends[backend], result, d_output, needed)

    def _run_backward(
        self, call: Any, backend: Backend, result: Any, d_output: Tensor, needed: dict[str, bool]
    ) -> tuple[Tensor, ...]:
        with without_autocast(d_output.device):
            grads = backend.backward(call, result, d_output, needed)
        return tuple(self._finish(field, call, grads, d_output, needed) for field in self.call.gradients)

    def _finish(
        self, field: Field, call: Any, grads: dict[str, Tensor | None], d_output: Tensor, needed: dict[str, bool]
    ) -> Tensor:
        """A gradient in the shape and dtype of its field; zeros where it is not needed: operators return no None."""
        grad, value = grads.get(field.name), getattr(call, field.name)
        if not needed[field.name] or (value is None and field.optional):
            return d_output.new_zeros(d_output.shape[:-2])
        if grad is None:
            return torch.zeros_like(d_output if value is None else value, memory_format=torch.contiguous_format)
        return grad.contiguous() if value is None else grad.sum_to_size(value.shape).to(value).contiguous()

    def _backward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        call, _, _, _, d_output, needed = self._read_backward(args)
        return tuple(self._finish(field, call, {}, d_output, needed) for field in self.call.gradients)

    def _traced_backward(self, *args: Any) -> Callable[[], Any] | None:
        call, name, revision, result, d_output, needed = self._read_backward(args)
        backend = self.backends[name].traced(call) if revision else None
        return None if backend is None else lambda: self._run_backward(call, backend, result, d_output, needed)


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

    torch.library.register_torch_dispatch(operator, FunctionalTensorMode, rule, lib=LIBRARY)
