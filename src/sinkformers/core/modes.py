"""What torch does around a call: autocast, tracing, transforms, dispatch modes."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CPU = torch.device("cpu")
_PLAIN = (Tensor, torch.nn.Parameter)
# Included while `autograd.grad(…, is_grads_batched=True)` runs, which has a vmap of its own, older than `torch.func`.
_GRADS_BATCHED = torch._C._dispatch_key_parse("VmapMode")

_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # pyright: ignore[reportAttributeAccessIssue]


def readable(tensor: Tensor) -> bool:
    """Whether Python may branch on values: not while traced, nor under `torch.func`, nor on `meta`, nor if fake."""
    under_func = torch._C._are_functorch_transforms_active()
    return not (torch.compiler.is_compiling() or under_func or tensor.is_meta or isinstance(tensor, FakeTensor))


def transformed() -> bool:
    """Whether a transform or a dispatch mode is active, or torch traces."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_GRADS_BATCHED)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0  # as in `in_forward_mode`
    )


def captured(device: torch.device) -> bool:
    """Whether operations on a device are being captured in a CUDA graph, so that none may wait for its result."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def intercepted(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a transform, a dispatch mode, the profiler or a tensor subclass decides what an operator does."""
    if transformed() or torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return True
    for tensor in tensors:  # noqa: SIM110 - a generator takes longer than the loop
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta):
            return True
    return False


def requires_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of the tensors requires a gradient."""
    for tensor in tensors:  # noqa: SIM110 - as above
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def saved_tensors_are_hooked() -> bool:
    """Whether hooks see each tensor that autograd saves, as checkpoints do. Where torch does not tell, they may."""
    return _TOP_HOOKS is None or _TOP_HOOKS(False) is not None


def in_forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken."""
    return forward_ad._current_level >= 0


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device; False for `meta`, which has none."""
    if device == CPU:  # reading the type of a device takes longer
        return torch.is_autocast_enabled("cpu")
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off: inside an operator it would still turn products into half precision."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()
