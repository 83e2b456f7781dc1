"""Language models: texts byte by byte, and associative recall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkformers.lab.data import SequenceSet, TextSet
from sinkformers.lab.tasks.classification import hits
from sinkformers.lab.tasks.config import LanguageConfig
from sinkformers.lab.workbench.observation import observe
from sinkformers.lab.workbench.task import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from sinkformers.models import LanguageModel

BETWEEN = b"\n\n"  # texts
ORDER_SEED = 0  # of the texts
AT_A_TIME = 64  # sequences, in evaluation
OBSERVED = 32  # test sequences on which attention is measured


class LanguageTask:
    """Train a language model to predict the next token, and test it on sequences of the test set.

    A sequence is given by a number. An epoch has `config.steps` batches of them, drawn at random.
    """

    metric: str  # beside the loss

    def __init__(self, config: LanguageConfig, seed: int, name: str) -> None:
        self.config, self.seed, self.name = config, seed, name
        self.recipe: Recipe = config.recipe

    def numbers(self, part: str) -> int:
        """Return how many sequences a part, `train` or `test`, has to draw from."""
        raise NotImplementedError

    def sequences(self, part: str, which: Tensor) -> Tensor:
        """Return sequences (b, length + 1) of tokens."""
        raise NotImplementedError

    def predicted(self) -> Tensor:
        """Return which tokens after the first are predicted, boolean (length,)."""
        raise NotImplementedError

    def measure(self, logits: Tensor, expected: Tensor) -> Tensor:
        """Return the sum of the metric over tokens."""
        raise NotImplementedError

    @property
    def facts(self) -> dict[str, Any]:
        data = {"name": self.name, "train": self.numbers("train"), "test": len(self._tested())}
        return {"config": asdict(self.config), "data": data}

    def model(self) -> LanguageModel:
        return self.config.model()

    def batches(self, epoch: int) -> Sequence[Tensor]:
        order = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        shape = (self.config.steps, self.recipe.batch)
        return list(torch.randint(self.numbers("train"), shape, generator=order))

    def losses(self, model: nn.Module, examples: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits, expected = self._predict(model, "train", examples)
        loss = F.cross_entropy(logits, expected, reduction="sum")
        return loss, {self.metric: self.measure(logits.detach(), expected)}

    def weight(self, examples: Tensor) -> float:
        return float(len(examples) * int(self.predicted().sum()))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        tested = self._tested()
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for examples in tested.split(AT_A_TIME)[accelerator.process_index :: accelerator.num_processes]:
            total += self.measure(*self._predict(model, "test", examples))
        return {self.metric: float(torch.as_tensor(accelerator.reduce(total))) / self.weight(tested)}

    def observe(self, model: nn.Module) -> dict[str, Any]:
        """Measure column sums, relative to those of uniform causal attention. Of the prefix definition, every row has
        columns of its own."""
        if self.config.causal == "prefix":
            return {"columns": {}, "layers": []}
        tokens = self.sequences("test", self._tested()[:OBSERVED])[:, :-1].to(next(model.parameters()).device)
        return observe(model, lambda: model(tokens))

    def _tested(self) -> Tensor:
        """Return the sequences of the test set that are used, spread over it."""
        last = self.numbers("test") - 1
        return torch.linspace(0, last, min(self.config.tested, last + 1), dtype=torch.float64).long()

    def _predict(self, model: nn.Module, part: str, examples: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (t, vocabulary) and the expected tokens (t,), on the device of the model."""
        device = next(model.parameters()).device
        tokens, predicted = self.sequences(part, examples).to(device), self.predicted().to(device)
        return model(tokens[:, :-1])[:, predicted].flatten(0, 1), tokens[:, 1:][:, predicted].flatten()


class TextTask(LanguageTask):
    """Texts byte by byte: windows of the training texts, one after the other in a fixed random order."""

    metric = "bits_per_byte"

    def __init__(self, config: LanguageConfig, seed: int, texts: TextSet) -> None:
        super().__init__(config, seed, texts.name)
        self.stream = {"train": _stream(texts.train.texts), "test": _stream(texts.test.texts)}

    def numbers(self, part: str) -> int:
        return len(self.stream[part]) - self.config.length

    def sequences(self, part: str, which: Tensor) -> Tensor:
        return self.stream[part][which[:, None] + torch.arange(self.config.length + 1)].long()

    def predicted(self) -> Tensor:
        return torch.ones(self.config.length, dtype=torch.bool)

    def measure(self, logits: Tensor, expected: Tensor) -> Tensor:
        return F.cross_entropy(logits, expected, reduction="sum").double() / math.log(2)


class RecallTask(LanguageTask):
    """Associative recall: the share of values that are found."""

    metric = "accuracy"

    def __init__(self, config: LanguageConfig, seed: int, data: SequenceSet) -> None:
        super().__init__(config, seed, data.name)
        self.data = data

    def numbers(self, part: str) -> int:
        return len(self.data.train if part == "train" else self.data.test)

    def sequences(self, part: str, which: Tensor) -> Tensor:
        return (self.data.train if part == "train" else self.data.test)[which]

    def predicted(self) -> Tensor:
        return self.data.predicted[1:]

    def measure(self, logits: Tensor, expected: Tensor) -> Tensor:
        return hits(logits, expected)


def _stream(texts: Sequence[str]) -> Tensor:
    """Return all texts as one sequence of bytes, uint8."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(ORDER_SEED)).tolist()
    plain = [text.replace("<br />", "\n").encode() for text in texts]
    joined = BETWEEN.join(plain[index] for index in order)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)
