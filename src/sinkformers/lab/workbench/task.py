"""The interface between the training loop and an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. The rate is divided by ten after each of the epochs in `drops`."""

    epochs: int
    batch: int
    rate: float
    drops: tuple[int, ...] = ()
    optimiser: str = "adam"
    momentum: float = 0.0
    accumulate: int = 1  # number of parts that a batch is split into, to save memory

    def rate_at(self, epoch: int, step: int = 1) -> float:
        """Return the learning rate of an epoch and of a step since the start of training, both counted from 1."""
        return self.rate / 10 ** sum(epoch > drop for drop in self.drops)

    def build(self, model: nn.Module) -> Optimizer:
        """Return the optimiser."""
        from torch.optim import SGD, Adam

        if self.optimiser == "adam":
            return Adam(model.parameters(), lr=self.rate, fused=True)
        assert self.optimiser == "sgd"
        return SGD(model.parameters(), lr=self.rate, momentum=self.momentum, fused=True)


@dataclass(frozen=True)
class WarmRecipe(Recipe):
    """fairseq's recipe for translation: linear warm-up over `warmup` steps, then decay with the inverse square root.

    The schedule starts after `begun` steps, which an earlier training has taken. Weight decay is decoupled (AdamW).
    """

    warmup: int = 4000
    begun: int = 0
    betas: tuple[float, float] = (0.9, 0.98)
    decay: float = 0.0

    def rate_at(self, epoch: int, step: int = 1) -> float:
        step = self.begun + step
        return super().rate_at(epoch) * min(step / self.warmup, (self.warmup / step) ** 0.5)

    def build(self, model: nn.Module) -> Optimizer:
        from torch.optim import AdamW

        return AdamW(model.parameters(), lr=self.rate, betas=self.betas, weight_decay=self.decay, fused=True)


class Task(Protocol):
    """Data, model and metrics of one run. Examples are indices, which the loop distributes among processes."""

    recipe: Recipe

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the record holds beside the settings: `config`, and `data` with its sizes."""
        ...

    def model(self) -> nn.Module:
        """Return a new model, initialised with torch's global generator."""
        ...

    def batches(self, epoch: int) -> Sequence[Tensor]:
        """Return the examples of each step of an epoch, the same on every call."""
        ...

    def losses(self, model: nn.Module, examples: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the examples' losses, with its graph, and sums of other metrics, without."""
        ...

    def weight(self, examples: Tensor) -> float:
        """Return the divisor of the sums of `losses`: the number of examples, or of their tokens."""
        ...

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Return metrics on the test set, the same in all processes."""
        ...

    def observe(self, model: nn.Module) -> dict[str, Any]:
        """Return statistics of attention on a fixed sample: `columns` and `layers`, as from `observation.observe`."""
        ...


@runtime_checkable
class HasFiles(Protocol):
    """A task whose model needs further files."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files to write beside the trained model, by name: what using it needs, such as vocabularies."""
        ...
