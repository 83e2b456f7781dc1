"""The adapters for timm, vit-pytorch, x-transformers and any module that calls SDPA; none of them is imported."""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from sinkformers.conversion.adapter import (
    CAUSAL,
    CONVERT,
    CROSS,
    POOLING,
    Adapter,
    Place,
    is_pooling,
    names_used,
    set_on_instance,
)
from sinkformers.conversion.intercept import intercept_attention, intercept_softmax, restore

_SDPA = "scaled_dot_product_attention"


def _from(package: str, module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == package


def _timm(place: Place) -> str | None:
    """Recognise attention that has a fused path; without it, timm applies SoftMax to the same scores."""
    if not _from("timm", place.module) or _SDPA not in names_used(type(place.module)):
        return None
    if type(place.module).__name__ == "XCA":
        return "attends over channels, not over tokens"
    return POOLING if is_pooling(place) else CONVERT


def _vit_pytorch(place: Place) -> str | None:
    """Recognise modules that have an `nn.Softmax` for their weights, or call SDPA."""
    if not _from("vit_pytorch", place.module):
        return None
    holds = any(isinstance(child, nn.Softmax) and child.dim == -1 for child in place.module.children())
    if not holds and _SDPA not in names_used(type(place.module)):
        return None
    return POOLING if is_pooling(place) else CONVERT


def _x_transformers(place: Place) -> str | None:
    """Recognise `Attend`, which computes outputs from queries, keys and values in every attention layer."""
    module: Any = place.module
    if not _from("x_transformers", module) or type(module).__name__ != "Attend":
        return None
    if module.causal:
        return CAUSAL
    if any(_is_cross_attention(layers, module) for layers in place.ancestors):
        return CROSS
    function = module.attn_fn
    if not (isinstance(function, functools.partial) and function.func is F.softmax and function.keywords["dim"] == -1):
        return "its weights are no SoftMax over keys"
    if module.head_learned_sink or module.add_zero_kv:
        return "asks for an attention sink, which Sinkhorn attention has no definition of"
    return CONVERT


def _is_cross_attention(layers: Any, module: nn.Module) -> bool:
    """Return whether a module is part of a layer that `layers` lists as cross-attention."""
    if not hasattr(layers, "layer_types"):
        return False
    kinds = zip(layers.layers, layers.layer_types, strict=False)
    return any(kind == "c" and any(part is module for part in layer.modules()) for layer, kind in kinds)


def _calls_sdpa(place: Place) -> str | None:
    return CONVERT if _SDPA in names_used(type(place.module)) else None


def _on_class(recognise: Callable[[Place], str | None]) -> Callable[[Place], str | None]:
    """Return a function that recognises the same modules, and refuses those that would not run the class's code."""

    def recognise_on_class(place: Place) -> str | None:
        verdict = recognise(place)
        return set_on_instance(place.module) or CONVERT if verdict == CONVERT else verdict

    return recognise_on_class


TIMM = Adapter("timm", _on_class(_timm), intercept_softmax, restore)
VIT_PYTORCH = Adapter("vit-pytorch", _on_class(_vit_pytorch), intercept_softmax, restore)
X_TRANSFORMERS = Adapter("x-transformers", _on_class(_x_transformers), intercept_softmax, restore)
SDPA = Adapter("sdpa", _on_class(_calls_sdpa), intercept_attention, restore)
