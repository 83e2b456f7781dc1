"""Libraries whose modules write their attention themselves, recognised without importing them; and anything by name."""

import functools
from typing import Any

import torch.nn.functional as F
from torch import nn

from sinkformers.conversion.adapter import CAUSAL, CONVERT, CROSS, POOLING, Adapter, Place, names_used, pools
from sinkformers.conversion.intercept import catch_attention, catch_softmax, release

_SDPA = "scaled_dot_product_attention"


def _from(package: str, module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == package


def _timm(place: Place) -> str | None:
    """Attention that has a fused path; what it writes out where that is off is SoftMax of the same scores."""
    if not _from("timm", place.module) or _SDPA not in names_used(type(place.module)):
        return None
    if type(place.module).__name__ == "XCA":
        return "attends over channels, not over tokens"
    return POOLING if pools(place) else CONVERT


def _vit_pytorch(place: Place) -> str | None:
    """Modules that hold an `nn.Softmax` for their weights, or call SDPA."""
    if not _from("vit_pytorch", place.module):
        return None
    holds = any(isinstance(child, nn.Softmax) and child.dim == -1 for child in place.module.children())
    if not holds and _SDPA not in names_used(type(place.module)):
        return None
    return POOLING if pools(place) else CONVERT


def _x_transformers(place: Place) -> str | None:
    """`Attend`, the part of every attention layer that goes from queries, keys and values to outputs."""
    module: Any = place.module
    if not _from("x_transformers", module) or type(module).__name__ != "Attend":
        return None
    if module.causal:
        return CAUSAL
    if any(_holds_as_cross(layers, module) for layers in place.ancestors):
        return CROSS
    function = module.attn_fn
    if not (isinstance(function, functools.partial) and function.func is F.softmax and function.keywords["dim"] == -1):
        return "its weights are no SoftMax over keys"
    if module.head_learned_sink or module.add_zero_kv:
        return "asks for an attention sink, which Sinkhorn attention has no definition of"
    return CONVERT


def _holds_as_cross(layers: Any, module: nn.Module) -> bool:
    if not hasattr(layers, "layer_types"):
        return False
    kinds = zip(layers.layers, layers.layer_types, strict=False)
    return any(kind == "c" and any(part is module for part in layer.modules()) for layer, kind in kinds)


def _calls_sdpa(place: Place) -> str | None:
    return CONVERT if _SDPA in names_used(type(place.module)) else None


TIMM = Adapter("timm", _timm, catch_softmax, release)
VIT_PYTORCH = Adapter("vit-pytorch", _vit_pytorch, catch_softmax, release)
X_TRANSFORMERS = Adapter("x-transformers", _x_transformers, catch_softmax, release)
SDPA = Adapter("sdpa", _calls_sdpa, catch_attention, release)
