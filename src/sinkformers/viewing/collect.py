"""The scores of a model's attention, from one forward pass of a copy."""

import copy
import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkformers.conversion import to_sinkformer
from sinkformers.conversion.adapter import CONVERT, UNDO, Place, Undo
from sinkformers.conversion.settings import Settings, assign, settings_of, tau_of
from sinkformers.conversion.survey import check_model, find_converted, survey
from sinkformers.conversion.torch_nn import TORCH, SinkhornMultiheadAttention
from sinkformers.conversion.watch import WatchedModule, watched_by
from sinkformers.core.limit import HasEvidence
from sinkformers.modules import MultiheadAttention
from sinkformers.viewing.codes import Codes, encode

CALLER = "view_attention"
PLAIN, STREAMING, FIXED = "plain", "streaming", "fixed"
MOST_ENTRIES = 2**27  # of all scores together: 256 MiB as they are kept here


class Head(NamedTuple):
    """The scores of one head, and the settings with which the model normalises them."""

    number: int
    codes: Codes
    n_iters: int | float
    tau: float
    unevenness: float  # the largest distance of a column sum from its target, as a share of it, under SoftMax


class Layer(NamedTuple):
    """One call of an attention module."""

    number: int  # in the order of the calls
    name: str
    definition: str  # PLAIN, STREAMING for rows in order, or FIXED where no scores are known, only weights
    rows: list[int]  # the queries that are not masked in all heads
    columns: list[int]  # the keys
    shape: tuple[int, int]  # of all queries and keys, masked ones included
    heads: list[Head]


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
    with torch.no_grad(), watched_by(places, {place.name: recorder.of(place) for place in places}):
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


class Recorder:
    """Keeps the scores of one example, call by call."""

    def __init__(self, example: int, layers: Collection[int] | None, heads: Collection[int] | None) -> None:
        self.example, self.heads = example, heads
        # Negative numbers count from the end, which is known only after the pass.
        self.wanted = None if layers is None or any(number < 0 for number in layers) else set(layers)
        self.layers: list[Layer] = []
        self.notes: list[str] = []
        self.calls: dict[str, int] = {}
        self.n_calls = self.n_entries = 0

    def of(self, place: Place) -> "Watcher":
        return Watcher(self, place)

    def add(self, place: Place, scores: Tensor, definition: str) -> None:
        """Keep the scores (batch, heads, n, m) of a call."""
        number, count = self.n_calls, self.calls.get(place.name, 0) + 1
        self.n_calls, self.calls[place.name] = number + 1, count
        if self.wanted is not None and number not in self.wanted:
            return
        batch, n_heads, n, m = scores.shape
        if not 0 <= self.example < batch:
            raise IndexError(f"{CALLER}: example must be from 0 to {batch - 1}, in the batch; got {self.example}.")
        name = place.name or type(place.module).__name__
        name = name if count == 1 else f"{name} (call {count})"
        asked = range(n_heads) if self.heads is None else {head + n_heads * (head < 0) for head in self.heads}
        kept = sorted(set(range(n_heads)) & set(asked))
        scores = scores[self.example]
        valid = scores[kept] != -torch.inf
        rows, columns = valid.any(-1).any(0), valid.any(-2).any(0)
        self._count(int(rows.sum()) * int(columns.sum()) * len(kept), name)
        parts = {head: scores[head][rows][:, columns] for head in kept}
        finite = {head: part for head, part in parts.items() if not (part.isnan() | (part == torch.inf)).any()}
        self.notes += [f"head {head} of {name}: its scores are not finite" for head in kept if head not in finite]
        found = [_head(*each, place.module, definition) for each in finite.items() if each[1].numel()]
        rows, columns = rows.nonzero()[:, 0].tolist(), columns.nonzero()[:, 0].tolist()
        self.layers.append(Layer(number, name, definition, rows, columns, (n, m), found))

    def _count(self, entries: int, name: str) -> None:
        self.n_entries += entries
        if self.n_entries > MOST_ENTRIES:
            raise ValueError(
                f"{CALLER}: the scores must be {MOST_ENTRIES:,} numbers at most; got {self.n_entries:,} up to {name}. "
                "Choose some with layers=[…] and heads=[…], or give a shorter input."
            )


class Watcher(WatchedModule):
    """Passes the scores of one module to a recorder."""

    def __init__(self, recorder: Recorder, place: Place) -> None:
        super().__init__(keep_scores=True)
        self.recorder, self.place = recorder, place

    def record(
        self,
        weights: Tensor,
        attn_mask: Tensor | None,
        queries: Tensor | None,
        keys: Tensor | None,
        evidence: HasEvidence | None = None,
        *,
        in_order: bool = False,
        scores: Tensor | None = None,
    ) -> None:
        if scores is None:
            self.recorder.add(self.place, weights.log(), FIXED)  # SoftMax of these are the weights
        else:
            self.recorder.add(self.place, scores, STREAMING if in_order else PLAIN)


def _head(number: int, scores: Tensor, module: nn.Module, definition: str) -> Head:
    settings = settings_of(module)
    assert settings is not None
    tau = tau_of(module, settings)
    tau = float(tau) if not isinstance(tau, Tensor) else float(tau.flatten()[number if tau.numel() > 1 else 0])
    n_iters = 1 if definition == FIXED else settings.n_iters
    return Head(number, encode(scores), n_iters, tau, _unevenness(scores.double().cpu(), definition))


def _unevenness(scores: Tensor, definition: str) -> float:
    """Return the largest relative distance of a column sum of SoftMax from that of uniform attention."""
    valid = scores != -torch.inf
    weights = scores.masked_fill(~valid.any(-1, keepdim=True), 0.0).softmax(-1).masked_fill(~valid, 0.0)
    if definition == STREAMING:
        target = (valid / valid.sum(-1, keepdim=True).clamp_min(1)).sum(-2)
    else:
        target = valid.any(-1).sum() / valid.any(-2).sum()
    columns = valid.any(-2)
    return float(((weights.sum(-2) - target) / target)[columns].abs().max())


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
        reason = f"none of them has one of the heads {sorted(heads)}" if heads else "nothing in them can be shown"
        raise ValueError(
            f"{CALLER}: {n} calls of attention were found, but {reason}. "
            + " ".join(itertools.islice(recorder.notes, 3))
        )
