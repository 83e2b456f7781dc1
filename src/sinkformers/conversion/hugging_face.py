"""The adapter for Hugging Face transformers: attention modules that take their function from its registry.

Nothing here imports transformers. A module is recognised by its code. It is converted by a copy of its configuration
that names our attention function. The rest of the model keeps the original configuration, so its masks, its decoder and
its other modules work as before.
"""

import copy
import functools
import inspect
from dataclasses import replace
from typing import Any

from torch import nn

from sinkformers.conversion.adapter import (
    CAUSAL,
    CONVERT,
    CROSS,
    CROSS_NAMES,
    POOLING,
    Adapter,
    Place,
    is_pooling,
    names_used,
    undo_of,
)
from sinkformers.conversion.settings import LEARNED, Settings, check, saved_iterations, settings_of

NAME = "sinkhorn"
CACHE_ARGUMENTS = ("past_key_values", "layer_past")
SOURCE_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
PAST = "_sinkhorn_past"  # the cache of the current call of a module, and whether that is cross-attention
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_KEYS = {"n_iters", "tau", "allow_one_way_mask", "causal", "modules"}  # of config.sinkhorn
_CAUSAL_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}


class Original:
    """The configuration of a module before it was converted, and whether it is the cross-attention of a decoder."""

    def __init__(self, config: Any, is_cross: bool) -> None:
        self.config, self.is_cross = config, is_cross

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The process that unpickles a module may not have registered our attention function.
        _register()
        self.__dict__.update(state)


def _register() -> None:
    from sinkformers.conversion import hugging_face_registry

    hugging_face_registry.register()


def stays_softmax(module: nn.Module) -> str | None:
    """Return why a module that uses the registry cannot be converted, judging by its own attributes, or None.

    Without the attribute `is_causal` they do not tell whether it is causal; the masks that its model builds do.
    """
    if getattr(module, "is_cross_attention", False):
        return CROSS
    if getattr(module, "is_causal", False):
        return CAUSAL
    if getattr(module, "is_decoder", False) or "Cross" in type(module).__name__:
        return CROSS
    return None


def _recognise(place: Place) -> str | None:
    module: Any = place.module
    if _REGISTRY not in names_used(type(module)) or not hasattr(module, "config"):
        return None
    reason = _of_decoder(place)
    if not hasattr(module, "is_causal") and not any(hasattr(around, "base_model_prefix") for around in place.ancestors):
        return "has no attribute is_causal, and the model that builds its masks is not given: convert the whole model"
    if getattr(module, "sinks", None) is not None:
        return "asks for sinks, which Sinkhorn attention has no definition of"
    if reason == CROSS and not set(CACHE_ARGUMENTS) & set(_positions(type(module))):
        return "cross-attention that is not given the cache of the decoder: generation could not continue column sums"
    if reason is None and is_pooling(place):
        return POOLING
    _renamed(module.config)  # raises, if it does, before anything is changed
    return reason or CONVERT


def _of_decoder(place: Place) -> str | None:
    """Return CAUSAL or CROSS for attention of a decoder, or None."""
    module, parent = place.module, place.parent
    reason = stays_softmax(module)
    if reason == CROSS and getattr(parent, "self_attn", None) is module:
        return CAUSAL  # in a layer that also has cross-attention
    if reason is not None:
        return reason
    if "Cross" in type(parent).__name__ or CROSS_NAMES.search(place.name.rpartition(".")[2]):
        return CROSS
    for around in reversed(place.ancestors):
        used = names_used(type(around))
        either = "create_bidirectional_mask" in used and hasattr(module, "is_causal")  # which says False
        if used & _CAUSAL_MASKS and not either:
            return CAUSAL
    return None


def _is_ordered(place: Place) -> bool:
    """Return whether a module is part of an encoder that processes a stream."""
    return any("Streaming" in type(module).__name__ for module in (*place.ancestors, place.module))


def _convert(place: Place) -> Original:
    _register()
    module, is_cross = place.module, _of_decoder(place) == CROSS
    original: Any = module.config
    module.config = _renamed(original)
    _show_settings(module)
    note = functools.partial(note_cache, _positions(type(module)))
    module.register_forward_pre_hook(note, with_kwargs=True)
    return Original(original, is_cross)


def _positions(kind: type[nn.Module]) -> dict[str, int]:
    """Return at which place, without `self`, the `forward` of a class takes a cache and the tokens of a source."""
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return {name: names.index(name) for name in (*CACHE_ARGUMENTS, *SOURCE_ARGUMENTS) if name in names}


def note_cache(positions: dict[str, int], module: nn.Module, args: Any, kwargs: Any) -> None:
    """Keep the cache that a module is given until it calls our attention function, which is not given it."""
    found = {**{name: args[place] for name, place in positions.items() if place < len(args)}, **kwargs}
    past = next((found[name] for name in CACHE_ARGUMENTS if found.get(name) is not None), None)
    if past is not None:
        is_cross = any(found.get(name) is not None for name in SOURCE_ARGUMENTS)
        module.__dict__[PAST] = past, is_cross
        announce(module, past, is_cross)
    elif PAST in module.__dict__:  # left there by a call that raised
        del module.__dict__[PAST]


def announce(module: nn.Module, past: Any, is_cross: bool) -> None:
    """Tell the layer of a cache that the keys that come next are counted, if it is one that carries column sums.

    A layer refuses other keys: those of a model that is not converted, and shares the cache.
    """
    cache = getattr(past, "cross_attention_cache" if is_cross else "self_attention_cache", past)
    layers, number = getattr(cache, "layers", ()), getattr(module, "layer_idx", None)
    if isinstance(number, int) and number < len(layers) and hasattr(layers[number], "is_announced"):
        layers[number].is_announced = True


def is_causal_without_a_mask(module: nn.Module) -> bool:
    """Return whether a bidirectional module, before it was converted, was causal in calls without a mask.

    All attention functions of transformers but eager attention make it so if the module has no attribute `is_causal`.
    """
    state = undo_of(module).state
    return not hasattr(module, "is_causal") and state.config._attn_implementation != "eager"


def _renamed(config: Any) -> Any:
    """Return a copy of a configuration that names our attention function."""
    ours = copy.copy(config)
    _set_implementation(ours, NAME)
    return ours


def _set_implementation(config: Any, name: str) -> None:
    """Name the attention function of one configuration; transformers' own setter would change its parts as well."""
    config._attn_implementation_internal = name
    if getattr(config, "_attn_implementation", None) != name:
        raise RuntimeError(
            f"sinkformers: {type(config).__name__} of this version of transformers does not read the attribute "
            "_attn_implementation_internal, so a module cannot be given another attention function. The tests pass "
            "with transformers 5.20 and 5.22."
        )


def _restore(module: nn.Module, undo: Original) -> None:
    module.config = undo.config
    module.__dict__.pop("extra_repr", None)
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, functools.partial) and hook.func is note_cache:
            del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]


def _show_settings(module: nn.Module) -> None:
    """Show the settings in `print(model)`, by an attribute of the instance, since its class stays as it is."""
    settings = settings_of(module)
    assert settings is not None
    parts = (type(module).extra_repr(module), settings.describe())
    module.__dict__["extra_repr"] = functools.partial(str, ", ".join(part for part in parts if part))


def _finish(model: nn.Module) -> None:
    """Write the settings of converted modules where they are shown, and into the configurations that are saved."""
    for module in model.modules():
        if settings_of(module) is not None and isinstance(undo_of(module).state, Original):
            _show_settings(module)
    seen: set[int] = set()
    for owner in model.modules():  # outermost first: encoder and decoder may share the configuration of the model
        config: Any = getattr(owner, "config", None)
        if not hasattr(config, "_attn_implementation") or settings_of(owner) is not None or id(config) in seen:
            continue
        seen.add(id(config))
        settings = _settings_below(owner)
        if settings is not None:
            config.sinkhorn = settings
            continue
        config.__dict__.pop("sinkhorn", None)
        if config._attn_implementation == NAME:  # loaded by our name: the default is the only one to restore
            _set_implementation(config, "sdpa")


def _settings_below(owner: nn.Module) -> dict[str, Any] | None:
    """Return `config.sinkhorn` for a model: one entry for all modules, or one per module if they differ.

    One entry is enough if `to_sinkformer` gives these settings to all modules.
    """
    each: dict[str, tuple[Settings | None, str, bool]] = {}
    by_name: list[bool] = []  # which of the converted modules another process would convert by our name

    def look(place: Place) -> None:
        settings, verdict = settings_of(place.module), _recognise(place)
        if settings is not None:
            by_name.append(isinstance(undo_of(place.module).state, Original))
        if settings is not None or verdict in (CONVERT, CAUSAL, CROSS):
            verdict = CONVERT if verdict is None else verdict  # converted by another adapter
            each[place.name] = settings, verdict, verdict != CONVERT or _is_ordered(place)
        for name, child in place.module.named_children():
            look(place.child(name, child))

    look(Place("", owner, ()))
    modules = {name: settings for name, (settings, _, _) in each.items() if settings is not None}
    if not modules:
        return None
    first = next(iter(modules.values()))
    causal = next((settings.causal for settings in modules.values() if settings.causal is not None), None)
    alike = all(by_name) or not any(by_name)  # otherwise our name alone would convert a part of the model
    if alike and all(
        settings == replace(first, causal=causal if is_causal else None)
        for settings, verdict, is_causal in each.values()
        if verdict == CONVERT or causal is not None
    ):
        return _as_dict(replace(first, causal=causal))
    return {"modules": {name: _as_dict(settings) for name, settings in modules.items()}}


def _as_dict(settings: Settings) -> dict[str, Any]:
    optional = {"allow_one_way_mask": settings.allow_one_way_mask, "causal": settings.causal}
    shown = {name: value for name, value in optional.items() if value}
    return {"n_iters": saved_iterations(settings.n_iters), "tau": settings.tau, **shown}


def from_config(config: Any) -> Settings:
    """Return the settings in `config.sinkhorn`, which apply to all attention of the model."""
    stored = getattr(config, "sinkhorn", None)
    stored = {} if stored is None else stored
    if not isinstance(stored, dict) or not set(stored) <= _KEYS:
        raise ValueError(
            'sinkformers: config.sinkhorn must be a dictionary like {"n_iters": 3, "tau": 1.0}; '
            f"got {stored!r}. Remove other keys."
        )
    if "modules" in stored:
        raise ValueError(
            "sinkformers: config.sinkhorn has settings for single modules, which attention chosen by name for the "
            'whole model cannot use. Load it without attn_implementation="sinkhorn", then: for name, settings in '
            'config.sinkhorn["modules"].items(): to_sinkformer(model, **settings, select=name).'
        )
    optional = (stored.get("allow_one_way_mask", False), stored.get("causal"))
    settings = check("config.sinkhorn", stored.get("n_iters", 3), stored.get("tau", 1.0), *optional)
    if settings.tau == LEARNED:
        raise ValueError(
            'sinkformers: config.sinkhorn says tau="learned", which needs parameters that attn_implementation='
            '"sinkhorn" cannot add. Build the model, to_sinkformer(model, tau="learned"), then load its state_dict.'
        )
    return settings


def _implied(module: nn.Module) -> Settings | None:
    config: Any = module.config
    return replace(from_config(config), causal=None) if config._attn_implementation == NAME else None


HUGGING_FACE = Adapter(
    "transformers",
    _recognise,
    _convert,
    _restore,
    _finish,
    _implied,
    converts_causal=True,
    is_ordered=_is_ordered,
)
