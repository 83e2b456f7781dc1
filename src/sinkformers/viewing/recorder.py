"""What a page shows of a model: layers and heads, recorded call by call in a forward pass."""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sinkformers.conversion.adapter import Place, undo_of
from sinkformers.conversion.settings import settings_of, tau_of
from sinkformers.conversion.watch import WatchedModule
from sinkformers.core.limit import HasEvidence
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
        if batch == 0:
            raise ValueError(f"{CALLER}: inputs must have an example; the batch is empty.")
        if not 0 <= self.example < batch:
            raise IndexError(f"{CALLER}: example must be from 0 to {batch - 1}, in the batch; got {self.example}.")
        name = place.name or undo_of(place.module).kind
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
