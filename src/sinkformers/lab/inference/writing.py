"""Texts written by a trained language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.inference.trained import TrainedRun, on
from sinkformers.lab.tasks.config import LanguageConfig
from sinkformers.models import LanguageModel


class Write:
    """A trained language model of bytes, which continues prompts.

    Args:
        most: bytes to write after each prompt, if the model's context has as many left.
        temperature: 0 takes the likeliest byte each time; otherwise bytes are drawn.
        seed: of the random numbers; the same seed gives the same text.
    """

    def __init__(self, run: TrainedRun, *, most: int, temperature: float, seed: int) -> None:
        assert isinstance(run.config, LanguageConfig)
        if run.config.pairs is not None:
            raise ExperimentError(
                f"{run.name} is a model of associative recall, which writes no text; name a run of another preset."
            )
        self.most, self.temperature = most, temperature
        self.generator = torch.Generator().manual_seed(seed)
        self.model = run.config.model()
        run.load_into(self.model)

    def __call__(self, lines: Sequence[str]) -> list[str]:
        """Return each prompt and what follows, on one line."""
        return [line + self._continued(self.model, line) for line in lines]

    def doubts(self, lines: Sequence[str]) -> list[str]:
        """Return warnings about the answers."""
        longest = self._longest()
        cut = any(len(line.encode()) > longest for line in lines)
        return [f"the last {longest} bytes of a prompt are read, and some have more."] * cut

    def words(self, line: str) -> tuple[int, list[str]]:
        """Return nothing: a model of bytes reads every word."""
        return 0, []

    def _longest(self) -> int:
        """Return how many bytes of a prompt are read: half of the context, or more if less is to be written."""
        return max(self.model.length - self.most, self.model.length // 2)

    def _continued(self, model: LanguageModel, line: str) -> str:
        prompt = line.encode()[-self._longest() :]
        (tokens,) = on(model, torch.tensor([list(prompt)]))
        room = min(self.most, model.length - len(prompt))
        written = model.generate(tokens, tokens=room, temperature=self.temperature, generator=self.generator)
        # A character that is cut at the end, or that the model did not finish, becomes a replacement character.
        text = bytes(written[0, len(prompt) :].tolist()).decode("utf-8", "replace")
        return " ".join(text.splitlines()) if text else ""
