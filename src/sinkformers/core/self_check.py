"""Self-checks: kernels that nobody has tried on a device are compared with torch there before `auto` takes them.

A backend names the kind of a call (`Backend.kind`): calls of one kind run the same code. The first call of a kind in a
process compares a small one with the torch backend in float64 on the CPU, output and gradients. The verdict holds for
the process.

Nothing of the user's is touched: numbers come from a generator of their own, and modes are left as they are.
"""

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sinkformers.core.agreement import deviation, tolerance
from sinkformers.core.description import describe
from sinkformers.core.modes import CPU, captured, readable, transformed, without_autocast

if TYPE_CHECKING:
    from sinkformers.core.backend import Backend

LIMIT_STEPS = 21  # what is counted for a call that has no number of iterations
_LOCK = threading.RLock()  # one for all operators: whoever checks may call another one
_running = False


class Verdict(NamedTuple):
    """What a self-check has found."""

    agrees: bool
    finding: str  # the worst deviation and its tolerance, or what was raised
    warning: str | None  # what to tell the user who did not ask for this backend


class SelfChecks:
    """The verdicts on the backends of one operator."""

    def __init__(self) -> None:
        self.verdicts: dict[Any, Verdict] = {}

    def verdict(self, backend: "Backend", reference: "Backend", call: Any, kind: Hashable) -> Verdict | None:
        """The verdict on a backend for calls of the kind of this one, from a check if there is none yet.

        None where it is not known and cannot be found now: in a compiled region, under a transform, in a CUDA graph
        that is being captured, inside a check, or without memory.
        """
        key = (backend.name, call[0].device, kind)
        found = self.verdicts.get(key)
        if found is not None or not readable(call[0]) or transformed() or captured(call[0].device):
            return found
        global _running
        with _LOCK:
            found = self.verdicts.get(key)
            if found is not None or _running:
                return found
            _running = True
            try:
                found = check(backend, reference, call)
            finally:
                _running = False
            if found is not None:
                self.verdicts[key] = found
            return found


def check(backend: "Backend", reference: "Backend", call: Any) -> Verdict | None:
    """Compare a small call of the same kind with a reference; None if there was no memory for it."""
    device = call[0].device
    # Modes of the user's that intercept functions, such as a default device, are off inside.
    with torch.no_grad(), torch._C.DisableTorchFunction(), without_autocast(device), without_autocast(CPU):
        try:
            agrees, finding = _compare(backend, reference, call)
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            agrees, finding = False, _raised(error)
    return Verdict(agrees, finding, None if agrees else _warning(backend, call, finding))


def _compare(backend: "Backend", reference: "Backend", call: Any) -> tuple[bool, str]:
    from sinkformers.core.sample import axes_of, sample_like

    dtype, sample = call[0].dtype, sample_like(call, backend.kind)
    off = deviation(outcome(backend, sample, dtype), outcome(reference, in_float64(sample), dtype))
    sizes = axes_of(sample)
    allowed = tolerance(dtype, sizes["n"], sizes["m"], getattr(sample, "n_iters", LIMIT_STEPS))
    allowed += getattr(sample, "tol", 0.0)
    finding = f"{off.name} deviates by {off.size:.2g} of its largest entry, where rounding explains {allowed:.2g}"
    return not off.exceeds(allowed), finding


def _warning(backend: "Backend", call: Any, finding: str) -> str:
    from sinkformers.core.environment import device_name, versions

    numbers = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f'backend="{backend.name}" failed its self-check on {device_name(call[0].device)} and is not used for such '
        f'calls: "auto" takes another one. {type(call).__name__}, {call[0].dtype}: {finding}. '
        f"{numbers}. Please report this with the output of `python -m sinkformers.doctor`."
    )


def outcome(backend: "Backend", call: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a backend returns for a call, and all gradients, by name; the incoming gradient is one of `dtype`."""
    description = describe(type(call))
    if hasattr(call, "block"):
        call = call.change(block=backend.rows_per_block(call))
    result = backend.forward(call)
    fields = describe(type(result)).fields
    generator = torch.Generator("cpu").manual_seed(1)
    numbers = torch.randn(result[0].shape, generator=generator, dtype=torch.float32, device="cpu")
    d_output = numbers.to(dtype).to(result[0])
    needed = {field.name: getattr(call, field.name) is not None for field in description.gradients}
    grads = backend.backward(_saved(call), _saved(result), d_output, needed)
    found = {fields[0].name: result[0]}
    for field, value in zip(fields[1:], result[1:], strict=True):
        if field.role is not None and not field.role.saved and field.role.axes:  # returned to the caller
            # The lowest numbers of a dtype stand for minus infinity in sums of logarithms.
            found[field.name] = value.masked_fill(value <= torch.finfo(value.dtype).min / 8, -torch.inf)
    for name in (name for name, is_needed in needed.items() if is_needed):
        value, grad = getattr(call, name), grads[name]
        assert grad is not None, name
        found[f"the gradient of {name}"] = grad.sum_to_size(value.shape)
    return found


def in_float64(call: Any) -> Any:
    """The same call on the CPU, its floating-point tensors in float64."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to("cpu", torch.float64) if value.is_floating_point() else value.cpu()

    return type(call)._make(convert(value) for value in call)


def _saved(parts: Any) -> Any:
    """What backward is given of a call or a result: None for tensors that are not saved."""
    fields = describe(type(parts)).fields
    kept = (
        None if field.role is not None and not field.role.saved else part
        for field, part in zip(fields, parts, strict=True)
    )
    return type(parts)._make(kept)


def _raised(error: Exception) -> str:
    """The first line of an error; compilers add pages."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"it raised {type(error).__name__}" + (f": {text[:200]}" if text else "")
