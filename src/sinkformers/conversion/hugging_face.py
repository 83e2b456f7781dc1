"""Hugging Face transformers: every attention module that takes its function from the library's registry.

Nothing here imports transformers. A module is recognised by its code, and converted by a copy of its configuration that
names our attention function; the rest of the model keeps the original, so its masks, its decoder and its other modules
work as before.
"""

import copy
from typing import Any

from torch import nn

from sinkformers.conversion.adapter import CAUSAL, CONVERT, CROSS, POOLING, Adapter, Place, names_used, pools, undo_of
from sinkformers.conversion.settings import LEARNED, Settings, check, settings_of

NAME = "sinkhorn"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_CAUSAL_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}


class Original:
    """The configuration that a converted module had."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled where nobody has converted anything yet, the registry must know our name all the same.
        _register()
        self.__dict__.update(state)


def _register() -> None:
    from sinkformers.conversion import hugging_face_registry

    hugging_face_registry.register()


def stays_softmax(module: nn.Module) -> str | None:
    """Why a module that goes through the registry is not for Sinkhorn, as far as it tells itself; None if it is."""
    if getattr(module, "is_causal", True):  # the library's own functions take it so where a module does not say
        return CAUSAL
    if getattr(module, "is_decoder", False) or "Cross" in type(module).__name__:
        return CROSS
    return None


def _recognise(place: Place) -> str | None:
    module, parent = place.module, place.parent
    if _REGISTRY not in names_used(type(module)) or not hasattr(module, "config"):
        return None
    reason = stays_softmax(module)
    if reason is not None:
        return reason
    if parent is not None and ("Cross" in type(parent).__name__ or getattr(parent, "encoder_attn", None) is module):
        return CROSS
    for around in reversed(place.ancestors):
        used = names_used(type(around))
        if used & _CAUSAL_MASKS and "create_bidirectional_mask" not in used:
            return CAUSAL
    for feature in ("sliding_window", "attn_logit_softcapping", "sinks"):
        if getattr(module, feature, None) is not None:
            return f"asks for {feature}, which Sinkhorn attention has no definition of"
    return POOLING if pools(place) else CONVERT


def _convert(place: Place) -> Original:
    _register()
    original: Any = place.module.config
    twin = copy.copy(original)
    twin._attn_implementation_internal = NAME
    place.module.config = twin
    return Original(original)


def _restore(module: nn.Module, undo: Original) -> None:
    module.config = undo.config


def _finish(model: nn.Module) -> None:
    """Write the settings into the configurations around converted modules: they are what is saved and loaded."""
    seen: set[int] = set()
    for owner in model.modules():  # outermost first: encoder and decoder may share the configuration of the whole
        config: Any = getattr(owner, "config", None)
        if not hasattr(config, "_attn_implementation") or settings_of(owner) is not None or id(config) in seen:
            continue
        seen.add(id(config))
        told = _settings_below(owner)
        if told is not None:
            config.sinkhorn = told
            continue
        config.__dict__.pop("sinkhorn", None)
        if config._attn_implementation == NAME:  # loaded by our name, there is no other to go back to than the default
            config._attn_implementation_internal = "sdpa"


def _settings_below(owner: nn.Module) -> dict[str, Any] | None:
    """`config.sinkhorn` of a model: one for all, or by module where they differ or only some are converted."""
    each: dict[str, Settings | None] = {}

    def look(place: Place) -> None:
        settings = settings_of(place.module)
        if settings is not None and isinstance(undo_of(place.module).state, Original):
            each[place.name] = settings
        elif settings is None and _recognise(place) == CONVERT:
            each[place.name] = None
        for name, child in place.module.named_children():
            look(Place(f"{place.name}.{name}" if place.name else name, child, (*place.ancestors, place.module)))

    look(Place("", owner, ()))
    told = {name: _told(settings) for name, settings in each.items() if settings is not None}
    if not told:
        return None
    first = next(iter(told.values()))
    if len(told) == len(each) and all(settings == first for settings in told.values()):
        return dict(first)
    return {"modules": told}


def _told(settings: Settings) -> dict[str, Any]:
    allowed = {"allow_one_way_mask": True} if settings.allow_one_way_mask else {}
    return {"n_iters": settings.n_iters, "tau": settings.tau, **allowed}


def from_config(config: Any) -> Settings:
    """The settings that a configuration holds for all attention of its model."""
    told = getattr(config, "sinkhorn", None)
    told = {} if told is None else told
    if not isinstance(told, dict) or not set(told) <= {"n_iters", "tau", "allow_one_way_mask", "modules"}:
        raise ValueError(
            'sinkformers: config.sinkhorn must be a dictionary like {"n_iters": 3, "tau": 1.0}; '
            f"got {told!r}. Other keys have no meaning here."
        )
    if "modules" in told:
        raise ValueError(
            "sinkformers: config.sinkhorn names modules of their own settings, which attention chosen by name for the "
            'whole model cannot honour. Load it without attn_implementation="sinkhorn", then: for name, settings in '
            'config.sinkhorn["modules"].items(): to_sinkformer(model, **settings, select=name).'
        )
    allowed = told.get("allow_one_way_mask", False)
    settings = check("config.sinkhorn", told.get("n_iters", 3), told.get("tau", 1.0), allowed)
    if settings.tau == LEARNED:
        raise ValueError(
            'sinkformers: config.sinkhorn says tau="learned", which needs parameters that attn_implementation='
            '"sinkhorn" cannot add. Build the model, to_sinkformer(model, tau="learned"), then load its state_dict.'
        )
    return settings


def _implied(module: nn.Module) -> Settings | None:
    config: Any = module.config
    return from_config(config) if config._attn_implementation == NAME else None


HUGGING_FACE = Adapter("transformers", _recognise, _convert, _restore, _finish, _implied)
