"""Beam search: find a likely translation by extending several hypotheses token by token."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.models.translation_transformer import State, TranslationTransformer


class Hypothesis(NamedTuple):
    """A finished translation: its score, and its tokens without `begin` and `end`."""

    score: float
    tokens: list[int]


class _Beams(NamedTuple):
    """Unfinished translations, k for each of b sentences: scores (b, k) and tokens (b, k, t)."""

    sentences: Tensor  # (b,): indices in the batch
    tokens: Tensor
    scores: Tensor
    state: State


@torch.no_grad()
def beam_search(
    model: TranslationTransformer,
    source: Tensor,
    mask: Tensor,
    *,
    begin: int,
    end: int,
    limits: Tensor,
    beam: int = 5,
    penalty: float = 1.0,
    never: tuple[int, ...] = (),
) -> list[Hypothesis]:
    """Return the best translation found for each source (batch, n); `mask` (batch, n) is True at valid tokens.

    A score is the sum of log-probabilities, that of `end` included, divided by (number of tokens)^`penalty`. A sentence
    is finished when `beam` hypotheses have ended, each among the `beam` likeliest at that step. `beam=1` is greedy
    search. Results do not depend on the other sentences of the batch. Dropout stays active in training mode: call
    `model.eval()` first.

    Args:
        begin, end: the first and the last token of every target.
        limits: (batch,), the largest number of tokens of each translation, `end` included. A translation has at least
            one other token, unless its limit is 1.
        never: tokens that are never generated.

    Examples:
        >>> import torch
        >>> from sinkformers.models import TranslationTransformer, beam_search
        >>> sizes = {"length": 20, "dim": 16, "depth": 2, "heads": 4, "hidden": 32}
        >>> model = TranslationTransformer(source_vocabulary=50, target_vocabulary=40, **sizes).eval()
        >>> source, mask = torch.randint(50, (3, 7)), torch.ones(3, 7, dtype=torch.bool)
        >>> found = beam_search(model, source, mask, begin=1, end=2, limits=torch.tensor([9, 9, 12]), never=(0, 1))
        >>> [len(hypothesis.tokens) < 12 for hypothesis in found]
        [True, True, True]
    """
    _check(model, source, end, limits, beam, never)
    batch, device = len(source), source.device
    state = model.begin(source, mask).select(torch.arange(batch, device=device).repeat_interleave(beam))
    scores = torch.full((batch, beam), -torch.inf, device=device, dtype=model.positions.dtype)
    scores[:, 0] = 0.0  # all hypotheses are equal at first, so one of them suffices
    first = torch.full((batch, beam, 1), begin, device=device)
    beams = _Beams(torch.arange(batch, device=device), first, scores, state)
    found: list[list[Hypothesis]] = [[] for _ in range(batch)]
    limits = limits.to(device)
    while len(beams.sentences):
        beams = _step(model, beams, found, limits, end, penalty, never)
    nothing = Hypothesis(-math.inf, [])  # for a model whose outputs are NaN
    return [max(each, key=lambda hypothesis: hypothesis.score, default=nothing) for each in found]


def _check(
    model: TranslationTransformer, source: Tensor, end: int, limits: Tensor, beam: int, never: tuple[int, ...]
) -> None:
    longest, words = len(model.positions), model.target.num_embeddings
    if beam < 1:
        raise ValueError(f"beam_search: beam must be a whole number ≥ 1 (1 is greedy); got {beam}.")
    if not isinstance(limits, Tensor) or limits.shape != source.shape[:1]:
        got = tuple(limits.shape) if isinstance(limits, Tensor) else limits
        raise ValueError(f"beam_search: limits must be a tensor of shape {tuple(source.shape[:1])}; got {got}.")
    if limits.numel() and not 1 <= int(limits.min()) <= int(limits.max()) <= longest:
        raise ValueError(
            f"beam_search: limits must be from 1 to {longest}, the longest target of the model; got {limits.tolist()}."
        )
    if not 0 <= end < words or end in never:
        raise ValueError(f"beam_search: end must be a token below {words} that is not in never; got {end}, {never}.")


def _step(
    model: TranslationTransformer,
    beams: _Beams,
    found: list[list[Hypothesis]],
    limits: Tensor,
    end: int,
    penalty: float,
    never: tuple[int, ...],
) -> _Beams:
    """Extend all hypotheses by one token; move those that end to `found`, and drop finished sentences."""
    b, k, length = beams.tokens.shape  # counts `begin`, so it is the number of tokens after this step
    logits, state = model.follow(beams.tokens[:, :, -1].reshape(-1, 1), beams.state)
    likely = logits[:, -1].log_softmax(-1).unflatten(0, (b, k))
    likely[..., list(never)] = -torch.inf
    last = length >= limits[beams.sentences]
    others = torch.arange(likely.shape[-1], device=likely.device) != end
    likely = likely.masked_fill(last[:, None, None] & others, -torch.inf)
    if length == 1:
        likely = likely.masked_fill(~(last[:, None, None] | others), -torch.inf)
    # At most k of the candidates end, so 2k of them leave k that continue.
    scores, flat = (beams.scores[..., None] + likely).flatten(1).topk(2 * k)
    origin, token = flat // likely.shape[-1], flat % likely.shape[-1]
    ends = token == end
    for row, place in (ends[:, :k] & scores[:, :k].isfinite()).nonzero().tolist():
        written = beams.tokens[row, origin[row, place], 1:].tolist()
        found[int(beams.sentences[row])].append(Hypothesis(float(scores[row, place]) / length**penalty, written))
    done = [len(found[sentence]) >= k for sentence in beams.sentences.tolist()]
    open_ = (~(last | torch.tensor(done, device=last.device))).nonzero().flatten()
    going = ends.long().argsort(dim=-1, stable=True)[open_, :k]
    origin, token, scores = (each[open_].gather(1, going) for each in (origin, token, scores))
    rows = (open_[:, None] * k + origin).flatten()
    tokens = torch.cat([beams.tokens.flatten(0, 1)[rows].unflatten(0, (len(open_), k)), token[..., None]], -1)
    return _Beams(beams.sentences[open_], tokens, scores, state.select(rows))
