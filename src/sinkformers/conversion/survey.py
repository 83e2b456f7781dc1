"""The survey of a model: its attention modules, their adapters, whether to convert them; and selection by users."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkformers.conversion.adapter import (
    ASK,
    CAUSAL,
    CONVERT,
    CROSS,
    UNDO,
    Adapter,
    Place,
    Undo,
    set_on_instance,
    undo_of,
)
from sinkformers.conversion.hugging_face import HUGGING_FACE, NAME
from sinkformers.conversion.inline_softmax import ATTENTION, SOFTMAX
from sinkformers.conversion.libraries import SDPA, TIMM, VIT_PYTORCH, X_TRANSFORMERS
from sinkformers.conversion.own_models import OWN_MODELS
from sinkformers.conversion.settings import Settings, assign, settings_of
from sinkformers.conversion.torch_nn import TORCH

# The first adapter that recognises a module is used.
TABLE = (OWN_MODELS, TORCH, HUGGING_FACE, TIMM, VIT_PYTORCH, X_TRANSFORMERS, SDPA, SOFTMAX)
ADAPTERS: dict[str, Adapter] = {adapter.name: adapter for adapter in TABLE}
ON_REQUEST = (SDPA.name,)

Select = str | Callable[[str, nn.Module], bool] | None


UNKNOWN = "its forward neither is torch's nor takes its function from transformers' attention registry"
SCRIPTED = "compiled by torch.jit, which cannot be changed: convert the module before it is scripted or traced"


class Finding(NamedTuple):
    place: Place
    adapter: Adapter | None
    verdict: str  # CONVERT, or why the module stays as it is
    is_causal: bool = False  # whether rows are normalised in order if the module is converted on request


def check_model(caller: str, model: Any) -> None:
    """Raise if the model is not a module in Python, with advice for common mistakes."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{caller}: model must be a module in Python; got one compiled by torch.jit ({model.original_name}), whose "
            f"attention cannot be changed. Call {caller} before torch.jit.script or torch.jit.trace."
        )
    if isinstance(model, nn.Module):
        return
    got, remedy = type(model).__name__, "Pass the model that holds the attention."
    if isinstance(model, type):
        got, remedy = f"the class {model.__name__}", f"Make one, {model.__name__}(…), and pass it."
    elif isinstance(model, Mapping):
        got, remedy = f"{got}, a state_dict?", "Load it into a model with load_state_dict, and pass the model."
    raise TypeError(f"{caller}: model must be a torch.nn.Module; got {got}. {remedy}")


def adapter_of(module: nn.Module) -> Adapter:
    """Return the adapter that converted a module."""
    return ADAPTERS[undo_of(module).adapter]


def survey(model: nn.Module, adapter: str | None, select: Select, causal: str | None = None) -> list[Finding]:
    """Return all attention modules, outermost first. Modules inside a recognised one are not searched.

    With a definition for causal attention, that of decoders is to be converted too.
    """
    if adapter is not None and adapter not in ADAPTERS:
        raise ValueError(
            f"to_sinkformer: adapter must be None or one of {', '.join(map(repr, ADAPTERS))}; got {adapter!r}."
        )
    rows = [ADAPTERS[adapter]] if adapter else [row for row in ADAPTERS.values() if row.name not in ON_REQUEST]
    picked = adapter in ON_REQUEST and select is not None
    findings: list[Finding] = []
    _search(Place("", model, ()), rows, select if picked else None, findings, set())
    return [_on_request(finding, causal) for finding in findings]


def _on_request(finding: Finding, causal: str | None) -> Finding:
    """Return the finding with its verdict for causal attention, if there is a definition of that."""
    place, row, verdict, _ = finding
    if verdict in (CAUSAL, CROSS) and row is not None and row.converts_causal:
        return Finding(place, row, verdict + ASK if causal is None else CONVERT, True)
    settings = settings_of(place.module)
    if verdict != CONVERT or row is None:
        return finding
    return finding._replace(is_causal=(settings is not None and settings.causal is not None) or row.is_ordered(place))


def _search(place: Place, rows: list[Adapter], picked: Select, findings: list[Finding], seen: set[int]) -> bool:
    """Append the findings at a place and below it; return whether there were any."""
    module = place.module
    if id(module) in seen:
        return False
    seen.add(id(module))
    if settings_of(module) is not None:
        findings.append(Finding(place, adapter_of(module), CONVERT))
        return True
    if isinstance(module, torch.jit.ScriptModule):
        if any(ATTENTION.search(str(getattr(part, "original_name", ""))) for part in module.modules()):
            findings.append(Finding(place, None, SCRIPTED))
            return True
        return False
    if picked is not None and matches(picked, place) and not any(settings_of(part) for part in module.modules()):
        findings.append(Finding(place, rows[0], set_on_instance(module) or CONVERT))
        return True
    for row in rows:
        verdict = row.recognise(place)
        if verdict is not None:
            findings.append(Finding(place, row, verdict))
            return True
    below = [_search(place.child(*each), rows, picked, findings, seen) for each in module.named_children()]
    if any(below):
        return True
    if ATTENTION.search(type(module).__name__):
        findings.append(Finding(place, None, UNKNOWN))
        return True
    return False


def matches(select: Select, place: Place) -> bool:
    """Return whether the user's `select` matches a module; None matches all."""
    if select is None:
        return True
    if isinstance(select, str):
        return fnmatch.fnmatchcase(place.name, select)
    return bool(select(place.name, place.module))


def check_select(caller: str, select: object) -> None:
    if select is not None and not isinstance(select, str) and not callable(select):
        raise TypeError(
            f'{caller}: select must be a pattern of module names ("encoder.layer.5.*"), a function of (name, module), '
            f"or None for all; got {type(select).__name__}."
        )


def apply(finding: Finding, settings: Settings, logits: Tensor | None) -> None:
    """Convert one module, or change the settings of one that is converted."""
    place, row = finding.place, finding.adapter
    assert row is not None
    assign(place.module, settings, logits)
    if UNDO not in place.module.__dict__:
        place.module.__dict__[UNDO] = Undo(row.name, type(place.module).__name__, row.convert(place))


def find_converted(model: nn.Module) -> list[Place]:
    """Return all converted modules; modules that attend by Sinkhorn without conversion are converted first."""
    findings = survey(model, None, None)
    for finding in findings:
        module, row = finding.place.module, finding.adapter
        if row is None or settings_of(module) is not None or not (finding.verdict == CONVERT or finding.is_causal):
            continue
        settings = row.implied(module)
        if settings is not None and (finding.verdict == CONVERT or settings.causal is not None):
            apply(finding, settings, None)
    return [finding.place for finding in findings if settings_of(finding.place.module) is not None]


def select_converted(caller: str, model: nn.Module, select: Select) -> list[Place]:
    """Return the converted modules that `select` matches; raise if there are none."""
    check_model(caller, model)
    check_select(caller, select)
    places = find_converted(model)
    if not places:
        kind, config = type(model).__name__, getattr(model, "config", None)
        if getattr(config, "_attn_implementation", None) == NAME:
            raise ValueError(
                f'{caller}: attn_implementation="{NAME}" was asked of this {kind}, but nothing in it attends by '
                "Sinkhorn: it runs SoftMax. to_sinkformer(model) converts it, or says of every module why not."
            )
        raise ValueError(f"{caller}: nothing in this {kind} is converted. Call to_sinkformer first.")
    selected = [place for place in places if matches(select, place)]
    if not selected:
        names = ", ".join(repr(place.name) for place in places)
        raise ValueError(f"{caller}: select={select!r} matches none of the converted modules: {names}.")
    return selected
