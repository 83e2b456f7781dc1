"""The scores of a model's attention, from one forward pass of a copy."""

import copy
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkformers.conversion import to_sinkformer
from sinkformers.conversion.adapter import CONVERT, UNDO, Place, Undo
from sinkformers.conversion.settings import Settings, assign, settings_of
from sinkformers.conversion.survey import check_model, find_converted, survey
from sinkformers.conversion.torch_nn import TORCH, SinkhornMultiheadAttention
from sinkformers.conversion.watch import watched_by
from sinkformers.modules import MultiheadAttention
from sinkformers.viewing.recorder import CALLER, Layer, Recorder


class Collected(NamedTuple):
    """What a forward pass showed: calls of attention in their order, and what is not shown, with the reason."""

    layers: list[Layer]
    notes: list[str]


def collect(
    model: nn.Module, inputs: Any, *, example: int, layers: Collection[int] | None, heads: Collection[int] | None
) -> Collected:
    """Run a copy of a model, which shares its parameters, in evaluation mode, and return the scores of its attention.

    Args:
        inputs: a mapping of keyword arguments, a tuple of arguments, a function of the model, or the only argument.
        example: which one of the batch.
        layers, heads: numbers of those to keep, from 0 in the order of the calls, or None for all.
    """
    check_model(CALLER, model)
    _check_numbers("layers", layers)
    _check_numbers("heads", heads)
    copied = _copy(model).eval()
    places, notes = _watchable(copied)
    recorder = Recorder(example, layers, heads)
    watched = watched_by(places, {place.name: recorder.of(place) for place in places})
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), watched:  # a compiled model would be traced
        _run(copied, inputs)
    _check_found(recorder, layers, heads)
    return Collected(recorder.layers, notes + recorder.notes)


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters, so that watching and converting leave the model as it is."""
    try:
        copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    except Exception as error:  # whatever a part of it raises when copied
        raise TypeError(
            f"{CALLER}: model must be one that copy.deepcopy can copy, since a copy is run so that the model stays as "
            f"it is; this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Pass the part of "
            "it that holds the attention, without loggers, locks or open files."
        ) from error
    for module in copied.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:  # all tokens are given at once
            config.use_cache = False
    return copied


def _watchable(model: nn.Module) -> tuple[list[Place], list[str]]:
    """Return the converted modules of a copy, after converting the others with one normalisation; and the rest.

    Prefix attention is not shown: its weights are not those of one matrix of scores.
    """
    for module in model.modules():
        if type(module) is MultiheadAttention and module.causal != "prefix":
            settings = Settings(module.n_iters, module.tau, module.allow_one_way_mask, module.causal)  # pyright: ignore
            module.__dict__[UNDO] = Undo(TORCH.name, type(module).__name__, None)
            module.__class__ = SinkhornMultiheadAttention
            assign(module, settings, None)
    find_converted(model)
    findings = survey(model, None, None, "streaming")
    prefix = [each for each in findings if getattr(each.place.module, "causal", None) == "prefix"]
    plain = {
        each.place.name: each.is_causal
        for each in findings
        if each.verdict == CONVERT and settings_of(each.place.module) is None and each not in prefix
    }
    if prefix and len(prefix) == len(findings):
        raise ValueError(
            f"{CALLER}: all attention of this {type(model).__name__} has the prefix definition, in which a "
            "row is not that of one matrix of scores. Attention of the streaming definition can be shown."
        )
    if plain or not any(settings_of(each.place.module) for each in findings):  # raises if there is nothing at all
        causal = "streaming" if any(plain.values()) else None
        to_sinkformer(model, 1, select=lambda name, _: name in plain, causal=causal)
    unseen = [each for each in findings if settings_of(each.place.module) is None]
    reasons = {id(each): "its rows are those of many matrices (the prefix definition)" for each in prefix}
    notes = [f"{each.place.name or 'the model'}: {reasons.get(id(each), each.verdict)}" for each in unseen]
    return [each.place for each in findings if settings_of(each.place.module) is not None], notes


def _run(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, tuple):
        model(*inputs)
    elif callable(inputs) and not isinstance(inputs, Tensor):
        inputs(model)
    else:
        model(inputs)


def _check_numbers(name: str, numbers: Any) -> None:
    if numbers is None:
        return
    if (
        isinstance(numbers, str)
        or not isinstance(numbers, Collection)
        or not all(type(each) is int for each in numbers)
    ):
        raise TypeError(f"{CALLER}: {name} must be a list of whole numbers, or None for all; got {numbers!r}.")
    if not numbers:
        raise ValueError(f"{CALLER}: {name} must name one at least; got {numbers!r}. Leave it out for all.")


def _check_found(recorder: Recorder, layers: Collection[int] | None, heads: Collection[int] | None) -> None:
    """Drop the layers that were not asked for; raise if nothing is left."""
    n = recorder.n_calls
    if n == 0:
        raise ValueError(
            f"{CALLER}: no attention module of the model was called. Inputs must run through it: a mapping of keyword "
            "arguments, a tuple of arguments, a function of the model, or the only argument."
        )
    wanted = set(range(n)) if layers is None else {number + n if number < 0 else number for number in layers}
    if not wanted <= set(range(n)):
        raise ValueError(f"{CALLER}: layers must be numbers from 0 to {n - 1}; got {sorted(layers or [])}.")
    recorder.layers = [layer for layer in recorder.layers if layer.number in wanted and layer.heads]
    if not recorder.layers:
        reason = f"none of them has one of the heads {sorted(heads)}" if heads else "all of their tokens are masked"
        reason = "; ".join(recorder.notes[:3]) or reason
        raise ValueError(f"{CALLER}: {n} calls of attention were found, but {reason}. Nothing can be shown.")
