"""Interception of the attention calls inside one module's `forward`.

A converted module gets a subclass of its class, whose `forward` runs under a `TorchFunctionMode`. Nothing is patched
globally, and calls outside that `forward` are not affected.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sinkformers.conversion.adapter import Place
from sinkformers.conversion.attend import allowed, attend, normalise, refuse_unknown_cache, self_attention_masks
from sinkformers.conversion.settings import is_softmax, settings_of
from sinkformers.distributed import refuse_in_parallel

CALLS = "_sinkhorn_calls"  # number of intercepted calls by kind; the report shows this dictionary
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class Interception(TorchFunctionMode):
    """Replace one module's SDPA, and its SoftMax over the last axis if `softmax`, by Sinkhorn attention."""

    def __init__(self, module: nn.Module, softmax: bool) -> None:
        super().__init__()
        self.module = module
        self.softmax = softmax

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is F.scaled_dot_product_attention:
            return _attention(self.module, *args, **kwargs)
        if self.softmax and func in _SOFTMAX:
            return _weights(self.module, func, *args, **kwargs)
        return func(*args, **kwargs)


class Subclassed(nn.Module):
    """A base of converted classes; instances are pickled with the original class, and how to make theirs from it."""

    _sinkhorn_original: type[nn.Module]
    _sinkhorn_make: tuple[Callable[[type[nn.Module], Any], type[nn.Module]], Any]

    def extra_repr(self) -> str:
        settings = settings_of(self)
        assert settings is not None
        return ", ".join(part for part in (super().extra_repr(), settings.describe()) if part)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, (_, *rest), *state = super().__reduce_ex__(max(2, int(protocol)))
        return _rebuild, (self._sinkhorn_original, self._sinkhorn_make, *rest), *state


class Intercepted(Subclassed):
    """First base of a converted class whose calls are intercepted."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Interception(self, self._sinkhorn_make[1]):
            return super().forward(*args, **kwargs)


@functools.cache
def _intercepted(kind: type[nn.Module], softmax: bool) -> type[nn.Module]:
    body = {"_sinkhorn_original": kind, "_sinkhorn_make": (_intercepted, softmax), "__module__": __name__}
    return type(f"Sinkhorn{kind.__name__}", (Intercepted, kind), body)


def _rebuild(kind: type[nn.Module], make: tuple[Any, Any], *rest: Any) -> nn.Module:
    module = kind.__new__(kind, *rest)
    converted, argument = make
    module.__class__ = converted(kind, argument)
    return module


def intercept_attention(place: Place) -> None:
    """Intercept `F.scaled_dot_product_attention`; the `convert` of an adapter."""
    _swap(place.module, softmax=False)


def intercept_softmax(place: Place) -> None:
    """Intercept SoftMax over the last axis as well, for modules that compute attention themselves."""
    _swap(place.module, softmax=True)


def restore(module: nn.Module, undo: Any) -> None:
    """Restore the class of a module; the `restore` of an adapter."""
    kind = type(module)
    assert issubclass(kind, Subclassed)
    module.__class__ = kind._sinkhorn_original
    del module.__dict__[CALLS]


def _swap(module: nn.Module, softmax: bool) -> None:
    module.__class__ = _intercepted(type(module), softmax)
    module.__dict__[CALLS] = {}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    settings = settings_of(module)
    assert settings is not None
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if is_causal and settings.causal is None and not is_softmax(settings):
        reason = "its causal calls stay SoftMax, and would attend to this rank's tokens alone."
        refuse_in_parallel(type(module).__name__, reason)
        count(module, "causal call left SoftMax")
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if query.is_nested:
        raise TypeError(f"sinkformers: {type(module).__name__} attends on nested tensors; pad them and pass a mask.")
    n, m = query.shape[-2], key.shape[-2]
    count(module, "attention call" if n == m else "attention call with unequally many queries and keys")
    if settings.causal is not None:
        refuse_unknown_cache(module, settings, n, m)
    if is_causal:
        attn_mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
    options.update(self_attention_masks(attn_mask, query, key), dropout_p=dropout_p)
    return attend(module, settings, query, key, value, **options)[0]


def _weights(
    module: nn.Module, func: Any, scores: Tensor, dim: int | None = None, *rest: Any, dtype: Any = None, **kwargs: Any
) -> Tensor:
    settings = settings_of(module)
    assert settings is not None
    if dim not in (-1, scores.dim() - 1) or rest:
        return func(scores, dim, *rest, dtype=dtype, **kwargs)
    count(module, "SoftMax call")
    scores = scores if dtype is None else scores.to(dtype)
    return normalise(module, settings, scores, allowed(scores))


def count(module: nn.Module, call: str) -> None:
    """Count a call of a converted module for the report."""
    if not torch.compiler.is_compiling():  # torch.compile would guard on the counter, and recompile at every call
        calls = module.__dict__[CALLS]
        calls[call] = calls.get(call, 0) + 1
