"""What keys have received, in the caches of Hugging Face transformers, for generation with causal attention.

transformers keeps keys and values in the layers of a cache. A layer that a converted module meets gets a subclass of
its class, which carries the running column sums too: reordering for beams, selections, copies and pickles include them.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from sinkformers.attention.causal import ColumnSums
from sinkformers.conversion.settings import Settings

REMEDY = "Take a DynamicCache (the default of `generate`), or use_cache=False."


class CarriesSums(CacheLayerMixin):
    """The first base of a layer that carries column sums; such a layer is made by changing the class of another."""

    is_croppable = False
    _layer_type = None  # transformers' own classes stay those of their layer types
    sums: ColumnSums
    queries: int  # how many the sums have counted
    settings: Settings  # of the module that counted them
    has_graph: bool  # whether gradients would have to flow through the sums, which have none
    is_announced = False  # whether the next keys come from a converted module, which counts what they receive

    def begin(self, settings: Settings, *, grows: bool) -> None:
        self.sums, self.queries, self.settings, self.has_graph = ColumnSums(grows=grows), 0, settings, False

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if getattr(self, "record_past", False):
            _refuse_rollback()
        if not self.is_announced:
            raise ValueError(
                "sinkformers: this cache was filled by a model with causal Sinkhorn attention, and is continued by a "
                "module that is not converted, so the column sums would lack its queries. Begin with a new cache."
            )
        self.is_announced = False
        _check_batch(self, args[0] if args else kwargs["key_states"])
        return super().update(*args, **kwargs)  # pyright: ignore[reportAbstractUsage]

    def counted(self, queries: int, *, has_graph: bool) -> None:
        """Count the queries of a call, and drop the sums of keys that the layer has dropped."""
        self.queries += queries
        self.has_graph = self.has_graph or has_graph
        dropped = len(self.sums) - _length(self)
        if dropped > 0:
            self.sums.map(lambda sums: sums[..., dropped:])

    def reset(self) -> None:
        super().reset()
        self.begin(self.settings, grows=self.sums.grows)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            _refuse_rollback()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        self.sums.map(lambda sums: sums.index_select(0, beam_idx.to(sums.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # pyright: ignore[reportAttributeAccessIssue]
        self.sums.map(lambda sums: sums.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # pyright: ignore[reportAttributeAccessIssue]
        self.sums.map(lambda sums: sums[indices])


class SinkhornLayer(CarriesSums, DynamicLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A growing layer that carries column sums."""


class SinkhornWindowLayer(CarriesSums, DynamicSlidingWindowLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer of the last keys that carries their column sums; keys that leave the window are not seen again."""


# The class of each layer once it carries sums. Layers of other classes, subclasses of these included, cannot.
CARRIERS: dict[type, type[CarriesSums]] = {
    DynamicLayer: SinkhornLayer,
    DynamicSlidingWindowLayer: SinkhornWindowLayer,
}


def carrier(
    module: nn.Module, settings: Settings, past: Any, query: Tensor, key: Tensor, *, is_cross: bool
) -> CarriesSums:
    """Return the layer of a cache that belongs to a module, after the keys of this call were added to it.

    Raises if the layer cannot carry column sums, or if these are not those of all queries before.
    """
    name, kind = type(module).__name__, type(past).__name__
    if is_cross and not isinstance(past, EncoderDecoderCache):
        raise NotImplementedError(
            f"sinkformers: {name} is the cross-attention of a decoder and was given a {kind}, which does not say how "
            "many queries came before. Pass an EncoderDecoderCache, or use_cache=False."
        )
    own, cache = _caches(past, is_cross)
    number: Any = getattr(module, "layer_idx", None)
    layer = _layer(cache, number)
    if type(cache) is DynamicCache and layer is None:
        raise NotImplementedError(
            f"sinkformers: {name} has no layer of its own in the cache (layer_idx={number} of {len(cache.layers)} "
            "layers), because it takes the keys and values of another module, and its column sums have no place there. "
            "Pass use_cache=False."
        )
    if type(cache) is not DynamicCache or cache.offloading:
        raise NotImplementedError(
            f"sinkformers: {name} was given a {type(cache).__name__}"
            + (" that is offloaded" if getattr(cache, "offloading", False) else "")
            + f", which cannot carry the column sums of causal attention. {REMEDY}"
        )
    if type(layer) in CARRIERS:
        layer.__class__ = CARRIERS[type(layer)]
        assert isinstance(layer, CarriesSums)
        layer.begin(settings, grows=not is_cross)
    elif not isinstance(layer, CarriesSums):
        raise NotImplementedError(
            f"sinkformers: {name} was given a cache with a {type(layer).__name__}, which cannot carry the column sums "
            f"of causal attention. {REMEDY}"
        )
    n, counter = query.shape[-2], _layer(own, number)
    position = 0 if counter is None else counter.get_seq_length()
    _check_continues(name, layer, settings, n, position)
    expected = _length(layer) if is_cross else len(layer.sums) + n
    if key.shape[-2] != expected:
        raise ValueError(
            f"sinkformers: {name} has {key.shape[-2]} keys, and its cache has {expected}. Begin with a new cache."
        )
    return layer


def refuse_counted(module: nn.Module, settings: Settings, past: Any, *, is_cross: bool) -> None:
    """Raise if a module that is SoftMax now is given a cache that it filled with other settings."""
    _, cache = _caches(past, is_cross)
    layer = _layer(cache, getattr(module, "layer_idx", None))
    if isinstance(layer, CarriesSums):
        _check_settings(type(module).__name__, layer, settings)


def _caches(past: Any, is_cross: bool) -> tuple[Any, Any]:
    """Return the cache of self-attention, which counts the tokens, and that of the module."""
    if not isinstance(past, EncoderDecoderCache):
        return past, past
    return past.self_attention_cache, past.cross_attention_cache if is_cross else past.self_attention_cache


def _length(layer: CacheLayerMixin) -> int:
    return 0 if layer.keys is None else layer.keys.shape[-2]


def _layer(cache: Any, number: Any) -> Any:
    layers = getattr(cache, "layers", [])
    return layers[number] if isinstance(number, int) and number < len(layers) else None


def _check_continues(name: str, layer: CarriesSums, settings: Settings, n: int, position: int) -> None:
    """Raise if the sums of a layer are not those of the queries before the last `n` of `position`, or of others."""
    if layer.queries + n != position:
        raise ValueError(
            f"sinkformers: the cache of {name} holds {position - n} tokens before this call, and the column sums of "
            f"{layer.queries} of them. It was filled by a model with SoftMax attention (unconverted, or with n_iters=1 "
            "or tau=0), cropped, or belongs to another text. Begin with a new cache."
        )
    _check_settings(name, layer, settings)
    if layer.has_graph and torch.is_grad_enabled():
        raise RuntimeError(
            f"sinkformers: gradients would flow through a cache of {name}, whose keys and values have a graph and "
            "whose column sums have none: they would be incomplete. Generate, or fill the cache, under "
            "torch.no_grad(), and train on whole sequences."
        )
    layer.settings = settings


def _check_settings(name: str, layer: CarriesSums, settings: Settings) -> None:
    if layer.queries and layer.settings != settings:
        raise ValueError(
            f"sinkformers: the cache of {name} was filled with {layer.settings}, and the module has {settings} now. "
            "Begin with a new cache."
        )


def _check_batch(layer: CarriesSums, key: Tensor) -> None:
    """Raise if keys (batch, heads, n, d) do not continue those of a layer."""
    held = None if layer.keys is None or not layer.keys.numel() else layer.keys.shape
    if held is not None and (held[:-2] != key.shape[:-2] or held[-1] != key.shape[-1]):
        raise ValueError(
            f"sinkformers: the cache holds keys {tuple(held)}, which keys {tuple(key.shape)} do not continue. Begin "
            "with a new cache for another batch or model, or repeat a prompt with cache.batch_repeat_interleave."
        )


def _refuse_rollback() -> NoReturn:
    raise NotImplementedError(
        "sinkformers: tokens cannot be removed from the cache of a model with causal Sinkhorn attention, because their "
        "queries are counted in its column sums. Assisted and speculative decoding, which remove tokens, need SoftMax "
        "(set_n_iters(model, 1)), or use_cache=False."
    )
