"""The adapter for Hugging Face transformers: attention modules that take their function from its registry.

Nothing here imports transformers. A module is recognised by its code. It is converted by a copy of its configuration
that names our attention function. The rest of the model keeps the original configuration, so its masks, its decoder and
its other modules work as before.
"""

import copy
import functools
from typing import Any

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
    undo_of,
)
from sinkformers.conversion.settings import LEARNED, Settings, check, saved_iterations, settings_of

NAME = "sinkhorn"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_CAUSAL_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}


class Original:
    """The configuration of a module before it was converted."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The process that unpickles a module may not have registered our attention function.
        _register()
        self.__dict__.update(state)


def _register() -> None:
    from sinkformers.conversion import hugging_face_registry

    hugging_face_registry.register()


def stays_softmax(module: nn.Module) -> str | None:
    """Return why a module that uses the registry cannot be converted, judging by its own attributes, or None."""
    if getattr(module, "is_causal", True):  # the default that the library's own attention functions assume
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
    if is_pooling(place):
        return POOLING
    _renamed(module.config)  # raises, if it does, before anything is changed
    return CONVERT


def _convert(place: Place) -> Original:
    _register()
    original: Any = place.module.config
    place.module.config = _renamed(original)
    _show_settings(place.module)
    return Original(original)


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
    """Return `config.sinkhorn` for a model: one entry for all modules, or one per module if they differ."""
    each: dict[str, Settings | None] = {}
    by_name: list[bool] = []  # which of the converted modules another process would convert by our name

    def look(place: Place) -> None:
        settings = settings_of(place.module)
        if settings is not None:
            each[place.name] = settings
            by_name.append(isinstance(undo_of(place.module).state, Original))
        elif _recognise(place) == CONVERT:
            each[place.name] = None
        for name, child in place.module.named_children():
            look(place.child(name, child))

    look(Place("", owner, ()))
    modules = {name: _as_dict(settings) for name, settings in each.items() if settings is not None}
    if not modules:
        return None
    first = next(iter(modules.values()))
    alike = all(by_name) or not any(by_name)  # otherwise our name alone would convert a part of the model
    if alike and len(modules) == len(each) and all(settings == first for settings in modules.values()):
        return dict(first)
    return {"modules": modules}


def _as_dict(settings: Settings) -> dict[str, Any]:
    allowed = {"allow_one_way_mask": True} if settings.allow_one_way_mask else {}
    return {"n_iters": saved_iterations(settings.n_iters), "tau": settings.tau, **allowed}


def from_config(config: Any) -> Settings:
    """Return the settings in `config.sinkhorn`, which apply to all attention of the model."""
    stored = getattr(config, "sinkhorn", None)
    stored = {} if stored is None else stored
    if not isinstance(stored, dict) or not set(stored) <= {"n_iters", "tau", "allow_one_way_mask", "modules"}:
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
    allowed = stored.get("allow_one_way_mask", False)
    settings = check("config.sinkhorn", stored.get("n_iters", 3), stored.get("tau", 1.0), allowed)
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
