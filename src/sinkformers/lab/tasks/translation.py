"""Translation by an encoder–decoder Transformer, for Table 2 and a panel of Figure 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.lab.data import Pairs, PairSet
from sinkformers.lab.tasks.bleu import bleu, detokenised
from sinkformers.lab.tasks.config import TranslationConfig
from sinkformers.lab.tasks.ragged import Ragged, token_batches
from sinkformers.lab.tasks.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary, joined
from sinkformers.lab.workbench.observation import observe
from sinkformers.lab.workbench.task import Recipe
from sinkformers.models import TranslationTransformer, beam_search

if TYPE_CHECKING:
    from accelerate import Accelerator

OBSERVED = 64  # test sentences on which attention is measured
AT_A_TIME = 4096  # source tokens per batch in evaluation


class Encoded(NamedTuple):
    """Sentences as tokens, with an end token; targets also have a begin token."""

    source: Ragged
    target: Ragged


class Translator:
    """Turns sentences into tokens, and translates them with a model."""

    def __init__(self, config: TranslationConfig, source: Vocabulary, target: Vocabulary) -> None:
        self.config, self.source, self.target = config, source, target

    @classmethod
    def learned(cls, config: TranslationConfig, pairs: Pairs) -> Translator:
        """Return a translator with vocabularies from training pairs."""
        if config.vocabulary is None:
            return cls(config, Vocabulary.given(pairs.source), Vocabulary.given(pairs.target))
        both = Vocabulary.learned([*pairs.source, *pairs.target], config.vocabulary)
        return cls(config, both, both)

    def model(self) -> TranslationTransformer:
        """Return a new model."""
        names = ("length", "dim", "depth", "heads", "hidden", "norm", "dropout", "n_iters", "causal")
        sizes = {name: getattr(self.config, name) for name in names}
        return TranslationTransformer(source_vocabulary=self.source.size, target_vocabulary=self.target.size, **sizes)

    def sources(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each sentence and an end token."""
        return [[*numbers, END] for numbers in self.source.encode(sentences)]

    def targets(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return a begin token, the tokens of each sentence and an end token. The model reads all but the last, and
        predicts all but the first."""
        return [[BEGIN, *numbers, END] for numbers in self.target.encode(sentences)]

    def fitting(self, sources: Sequence[Sequence[int]]) -> Ragged:
        """Return sources as the model takes them: of long ones only the last tokens."""
        return Ragged([numbers[-self.config.length :] for numbers in sources])

    def translate(self, model: TranslationTransformer, source: Tensor, mask: Tensor) -> list[str]:
        """Translate padded sources (batch, n) by beam search."""
        source, mask = (each.to(model.positions.device) for each in (source, mask))
        times, more = self.config.room
        limits = (mask.sum(1) * times + more).long().clamp(max=self.config.length)
        options = {"beam": self.config.beam, "penalty": self.config.penalty, "never": (PAD, BEGIN, UNKNOWN)}
        found = beam_search(model, source, mask, begin=BEGIN, end=END, limits=limits, **options)
        return [self.target.decode(each.tokens) for each in found]


class TranslationTask:
    """Train on pairs of similar length, `recipe.batch` tokens at a time; translate the first test set by beam search,
    and compute BLEU.

    If the model was trained for `begun` epochs before, rates and the order of batches continue from there.
    """

    def __init__(self, config: TranslationConfig, seed: int, pairs: PairSet, *, begun: int = 0) -> None:
        self.config, self.seed, self.pairs, self.begun = config, seed, pairs, begun
        self.translator = Translator.learned(config, pairs.train)
        self.train = self._trained_on(pairs.train)
        self.test_name, test = next(iter(pairs.tests.items()))
        self.references = list(test.target)
        self.test = self._tested_with(test)
        self.longer = torch.maximum(self.train.source.lengths, self.train.target.lengths)
        self.recipe: Recipe = replace(config.recipe, begun=begun * len(self.batches(1)))

    @property
    def facts(self) -> dict[str, Any]:
        sizes = {"train": len(self.train.source), "test": len(self.references), "tested": self.test_name}
        keys = {"source": self.translator.source.sha256, "target": self.translator.target.sha256}
        note = {"note": self.pairs.note} if self.pairs.note else {}
        signatures = {name: bleu(["a"], ["a"], tokenised=tokenised).signature for name, tokenised in self._scores()}
        data = {"name": self.pairs.name, **sizes, **note, "vocabularies": keys, "signatures": signatures}
        return {"config": asdict(self.config), "data": data}

    def files(self) -> dict[str, bytes]:
        return {f"{side}.json": getattr(self.translator, side).to_json().encode() for side in ("source", "target")}

    def model(self) -> TranslationTransformer:
        return self.translator.model()

    def batches(self, epoch: int) -> Sequence[Tensor]:
        order = torch.Generator().manual_seed(1_000_003 * self.seed + self.begun + epoch)
        return token_batches(self.longer, self.config.recipe.batch, order)

    def losses(self, model: nn.Module, examples: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits, expected = self._predict(model, self.train, examples)
        return _entropy(logits, expected, self.config.smoothing), {"nll": _entropy(logits.detach(), expected).double()}

    def weight(self, examples: Tensor) -> float:
        return float(self.train.target.lengths[examples].sum() - len(examples))  # begin tokens are not predicted

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        from accelerate.utils import gather_object

        bare = accelerator.unwrap_model(model)
        loss = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        written: list[tuple[int, str]] = []
        batches = token_batches(self.test.source.lengths, AT_A_TIME, torch.Generator().manual_seed(0))
        for examples in batches[accelerator.process_index :: accelerator.num_processes]:
            loss += _entropy(*self._predict(bare, self.test, examples))
            written += zip(examples.tolist(), self._translated(bare, examples), strict=True)
        translations = [text for _, text in sorted(gather_object(written))]
        n_tokens = int(self.test.target.lengths.sum()) - len(self.references)
        return {**self._score(translations), "loss": float(torch.as_tensor(accelerator.reduce(loss))) / n_tokens}

    def observe(self, model: nn.Module) -> dict[str, Any]:
        assert isinstance(model, TranslationTransformer)
        sample = torch.linspace(0, len(self.references) - 1, min(OBSERVED, len(self.references))).long()
        device = model.positions.device
        source, mask = (each.to(device) for each in self.test.source.padded(sample))
        return observe(model, lambda: model.begin(source, mask))

    def _translated(self, model: TranslationTransformer, examples: Tensor) -> list[str]:
        return self.translator.translate(model, *self.test.source.padded(examples))

    def _scores(self) -> list[tuple[str, bool]]:
        """Return the names of the scores, and whether each is of tokenised text, as published for tokenised files."""
        return [("bleu", False), *([("bleu_tokenised", True)] if self.config.vocabulary is None else [])]

    def _score(self, translations: list[str]) -> dict[str, float]:
        if self.config.vocabulary is not None:
            return {"bleu": bleu(translations, self.references).score}
        references = [joined(reference) for reference in self.references]
        plain = [[detokenised(text) for text in side] for side in (translations, references)]
        return {
            "bleu": bleu(*plain).score,
            "bleu_tokenised": bleu(translations, references, tokenised=True).score,
        }

    def _trained_on(self, pairs: Pairs) -> Encoded:
        """Encode training pairs, without those that are too long."""
        longest = self.config.length
        both = zip(self.translator.sources(pairs.source), self.translator.targets(pairs.target), strict=True)
        kept = [(source, target) for source, target in both if max(len(source), len(target) - 1) <= longest]
        return Encoded(Ragged([source for source, _ in kept]), Ragged([target for _, target in kept]))

    def _tested_with(self, pairs: Pairs) -> Encoded:
        """Encode all test pairs, truncated."""
        targets = [target[: self.config.length + 1] for target in self.translator.targets(pairs.target)]
        return Encoded(self.translator.fitting(self.translator.sources(pairs.source)), Ragged(targets))

    @staticmethod
    def _predict(model: nn.Module, pairs: Encoded, examples: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (b, t, vocabulary) and the expected tokens (b, t), on the device of the model."""
        device = next(model.parameters()).device
        source, mask = pairs.source.padded(examples)
        target = pairs.target.padded(examples)[0].to(device)
        return model(source.to(device), mask.to(device), target[:, :-1]), target[:, 1:]


def _entropy(logits: Tensor, expected: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the sum of cross-entropies over valid tokens."""
    options: dict[str, Any] = {"ignore_index": PAD, "reduction": "sum", "label_smoothing": smoothing}
    return F.cross_entropy(logits.flatten(0, 1), expected.flatten(), **options)
