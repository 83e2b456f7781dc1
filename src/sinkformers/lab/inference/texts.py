"""Classification of reviews and translation of sentences, a few lines at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sinkformers import watch_attention
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.inference.trained import TrainedRun, on
from sinkformers.lab.tasks.texts import TextConfig, TextReader
from sinkformers.lab.tasks.texts_authors import authors_model
from sinkformers.lab.tasks.translation import TranslationConfig, Translator
from sinkformers.lab.tasks.vocabulary import END, UNKNOWN, Vocabulary

M = TypeVar("M", bound=nn.Module)
PIECES = (
    "most words of a text are unknown to this model, which was trained on text that was tokenised, converted to lower "
    "case and split into subwords; give it text prepared by the same script."
)
MARKS = {END: "(end)", UNKNOWN: "(unknown)"}


@dataclass(frozen=True)
class Attention:
    """Weights (n, n) of a layer of the encoder, the mean over its heads, and the n tokens as text."""

    layer: str
    tokens: list[str]
    weights: Tensor


class Judge:
    """A trained classifier of texts."""

    def __init__(self, run: TrainedRun) -> None:
        assert isinstance(run.config, TextConfig)
        self.reader = TextReader(run.file("vocabulary.json", Vocabulary.of_json), run.config)
        self.names = run.classes()
        build = partial(authors_model, run.config) if run.config.authors else run.config.model
        self.model: nn.Module = run.load_into(build(self.reader.vocabulary.size, len(self.names)))

    @torch.no_grad()
    def __call__(self, lines: Sequence[str]) -> list[str]:
        """Return the most probable class of each text and its probability, separated by a tab."""
        tokens, mask = self.reader.encode(lines).padded(torch.arange(len(lines)))
        likely, which = self.model(*on(self.model, tokens, mask)).softmax(-1).max(-1)
        return [f"{self.names[k]}\t{p:.3f}" for k, p in zip(which.tolist(), likely.tolist(), strict=True)]

    def doubts(self, lines: Sequence[str]) -> list[str]:
        """Return warnings about the answers."""
        longest = self.reader.config.length
        cut = any(len(text) > longest for text in self.reader.whole(lines))
        return [f"the first {longest} tokens of a text are read, and some have more."] * cut

    def words(self, line: str) -> tuple[int, list[str]]:
        """Return the number of words in a text, and those that are not in the vocabulary."""
        return self.reader.words(line)

    def attention(self, line: str, layer: str | None = None) -> Attention:
        """Return the attention of a layer, by default the last."""
        run, spelt = self.read(line)
        return _watched(self.model, run, spelt, layer)

    def read(self, line: str) -> tuple[Callable[[nn.Module], object], list[str]]:
        """Return a function that runs a model on a text, and its tokens as text."""
        tokens, mask = self.reader.encode([line]).padded(torch.arange(1))
        spelt = [self.reader.vocabulary.decode([number]) for number in tokens[0].tolist()]
        return lambda model: model(*on(model, tokens, mask)), spelt


class Translate:
    """A trained translation model."""

    def __init__(self, run: TrainedRun) -> None:
        assert isinstance(run.config, TranslationConfig)
        source, target = (run.file(f"{side}.json", Vocabulary.of_json) for side in ("source", "target"))
        self.translator = Translator(run.config, source, target)
        self.model = self.translator.model()
        run.load_into(self.model)

    def __call__(self, lines: Sequence[str]) -> list[str]:
        """Return the translation of each sentence."""
        return self.translator.translate(self.model, *self._padded(lines))

    def doubts(self, lines: Sequence[str]) -> list[str]:
        """Return warnings about the answers."""
        longest, sources = self.translator.config.length, self.translator.sources(lines)
        cut = any(len(source) > longest for source in sources)
        doubts = [f"the last {longest} tokens of a text are read, and some have more."] * cut
        numbers = [number for source in sources for number in source if number != END]
        # A vocabulary learned from plain text encodes every text; one of subword files knows only those subwords.
        return doubts + [PIECES] * (2 * numbers.count(UNKNOWN) > len(numbers))

    def words(self, line: str) -> tuple[int, list[str]]:
        """Return the number of words in a text, and those that are not in the vocabulary."""
        return self.translator.source.words(line)

    @torch.no_grad()
    def attention(self, line: str, layer: str | None = None) -> Attention:
        """Return the attention of a layer of the encoder, by default the last."""
        run, spelt = self.read(line)
        return _watched(self.model, run, spelt, layer)

    def read(self, line: str) -> tuple[Callable[[Any], object], list[str]]:
        """Return a function that runs the encoder of a model on a sentence, and its tokens as text."""
        tokens, mask = self._padded([line])
        spelt = [MARKS.get(number) or self.translator.source.decode([number]) for number in tokens[0].tolist()]
        return lambda model: model.begin(*on(model, tokens, mask)), spelt

    def _padded(self, lines: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self.translator.fitting(self.translator.sources(lines)).padded(torch.arange(len(lines)))


@torch.no_grad()
def _watched(model: M, run: Callable[[M], object], spelt: list[str], layer: str | None) -> Attention:
    """Return the attention between the tokens `spelt`. It runs a copy: watching replaces the class of attention."""
    model = copy.deepcopy(model)
    with watch_attention(model, keep_weights=True) as watch:
        run(model)
    seen = {name: each.calls[0].weights for name, each in watch.items() if each.calls}
    if layer is not None and layer not in seen:
        raise ExperimentError(f"there is no layer {layer!r}. Choose one of {', '.join(seen)}.")
    name = layer or list(seen)[-1]
    weights = seen[name]
    assert weights is not None
    n = len(spelt)  # a model may pad beyond its text
    return Attention(name, spelt, weights[0, :, :n, :n].mean(0).cpu())
