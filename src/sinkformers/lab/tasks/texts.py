"""Classification of texts by an encoder, for Figure 4."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkformers.lab.data import TextSet
from sinkformers.lab.tasks.classification import entropy, hits, measured
from sinkformers.lab.tasks.config import TextConfig
from sinkformers.lab.tasks.ragged import Ragged, even_batches, token_batches
from sinkformers.lab.tasks.vocabulary import Vocabulary
from sinkformers.lab.workbench.observation import observe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from sinkformers.models import TextEncoder

OBSERVED = 64  # test texts on which attention is measured
AT_A_TIME = 16_384  # tokens per batch in evaluation


class TextReader:
    """Turns texts into tokens, with line breaks, case and length as configured."""

    def __init__(self, vocabulary: Vocabulary, config: TextConfig) -> None:
        self.vocabulary, self.config = vocabulary, config

    @classmethod
    def learned(cls, texts: Sequence[str], config: TextConfig) -> TextReader:
        """Return a reader with a vocabulary learned from `texts`."""
        return cls(Vocabulary.learned(_normalised(texts, config), config.vocabulary), config)

    def whole(self, texts: Sequence[str]) -> list[list[int]]:
        """Return all tokens of each text, without truncation."""
        return self.vocabulary.encode(_normalised(texts, self.config))

    def words(self, text: str) -> tuple[int, list[str]]:
        """Return the number of words in a text, and those that are no token of their own."""
        return self.vocabulary.words(_normalised([text], self.config)[0])

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Return the tokens of each text, truncated."""
        return Ragged([each[: self.config.length] for each in self.whole(texts)])


def _normalised(texts: Sequence[str], config: TextConfig) -> list[str]:
    texts = [text.replace("<br />", "\n") for text in texts]
    return [text.lower() for text in texts] if config.lower else texts


class TextTask:
    """Train an encoder on the training texts, evaluate it on all test texts.

    The vocabulary is learned from the training texts. A batch holds texts of similar length, padded to the longest; a
    mask marks the valid tokens.
    """

    def __init__(self, config: TextConfig, seed: int, texts: TextSet) -> None:
        self.config, self.seed, self.texts = config, seed, texts
        self.recipe = config.recipe
        self.reader = TextReader.learned(texts.train.texts, config)
        self.train, self.test = (self.reader.encode(part.texts) for part in (texts.train, texts.test))

    @property
    def facts(self) -> dict[str, Any]:
        sizes = {"train": len(self.train), "test": len(self.test)}
        data = {"name": self.texts.name, **sizes, "vocabulary": self.reader.vocabulary.sha256}
        return {"config": asdict(self.config), "data": data}

    def files(self) -> dict[str, bytes]:
        classes = json.dumps(self.texts.classes).encode()
        return {"vocabulary.json": self.reader.vocabulary.to_json().encode(), "classes.json": classes}

    def model(self) -> TextEncoder:
        return self.config.model(self.reader.vocabulary.size, len(self.texts.classes))

    def lengths(self, texts: Ragged) -> Tensor:
        """Return the number of tokens of each text, as the model sees it."""
        return texts.lengths

    def batches(self, epoch: int) -> Sequence[Tensor]:
        order = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        return even_batches(self.lengths(self.train), self.recipe.batch, order)

    def losses(self, model: nn.Module, examples: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits, labels = self._answer(model, self.train, self.texts.train.labels, examples)
        return self.loss(logits, labels), {"accuracy": hits(logits, labels)}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return entropy(logits, labels)

    def weight(self, examples: Tensor) -> float:
        return len(examples)

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        batches = token_batches(self.lengths(self.test), AT_A_TIME, torch.Generator().manual_seed(0))
        mine = batches[accelerator.process_index :: accelerator.num_processes]

        def answer(examples: Tensor) -> tuple[Tensor, Tensor]:
            return self._answer(model, self.test, self.texts.test.labels, examples)

        return measured(answer, mine, len(self.test), accelerator, self.loss)

    def observe(self, model: nn.Module) -> dict[str, Any]:
        """Measure attention on texts spread over the test set, a few at a time."""
        sample = torch.linspace(0, len(self.test) - 1, min(OBSERVED, len(self.test))).long()
        parts = sample[self.test.lengths[sample].argsort(stable=True)].split(OBSERVED // 4)
        labels = self.texts.test.labels
        return observe(model, lambda: [self._answer(model, self.test, labels, part) for part in parts])

    @staticmethod
    def _answer(model: nn.Module, texts: Ragged, labels: Tensor, examples: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and labels, on the device of the model."""
        device = next(model.parameters()).device
        tokens, mask = texts.padded(examples)
        return model(tokens.to(device), mask.to(device)), labels[examples].to(device)
