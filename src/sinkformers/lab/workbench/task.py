"""What the training loop has to know of an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. The rate is divided by ten after each of the epochs in `drops`."""

    epochs: int
    batch: int
    rate: float
    drops: tuple[int, ...] = ()
    optimiser: str = "adam"
    momentum: float = 0.0
    accumulate: int = 1  # a batch is worked off in so many parts

    def rate_at(self, epoch: int, step: int = 1) -> float:
        """The learning rate of an epoch, and of a step since the beginning of training, both counted from 1."""
        return self.rate / 10 ** sum(epoch > drop for drop in self.drops)

    def build(self, model: nn.Module) -> Optimizer:
        if self.optimiser == "adam":
            return Adam(model.parameters(), lr=self.rate, fused=True)
        assert self.optimiser == "sgd"
        return SGD(model.parameters(), lr=self.rate, momentum=self.momentum, fused=True)


@dataclass(frozen=True)
class WarmRecipe(Recipe):
    """fairseq's for translation: the rate rises over `warmup` steps, then falls with the inverse root of their number.

    `begun` steps were taken before this training, which goes on from there. Weights decay apart from Adam's moments.
    """

    warmup: int = 4000
    begun: int = 0
    betas: tuple[float, float] = (0.9, 0.98)
    decay: float = 0.0

    def rate_at(self, epoch: int, step: int = 1) -> float:
        step = self.begun + step
        return super().rate_at(epoch) * min(step / self.warmup, (self.warmup / step) ** 0.5)

    def build(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.rate, betas=self.betas, weight_decay=self.decay, fused=True)


class Task(Protocol):
    """Data, model and measures of one run. Examples are numbers; the loop shares them out among processes."""

    recipe: Recipe

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the record says of the run beside its settings: `config`, and the data with its sizes."""
        ...

    def model(self) -> nn.Module:
        """A fresh model, drawn from torch's global generator."""
        ...

    def batches(self, epoch: int) -> Sequence[Tensor]:
        """The examples of each step, the same whenever they are asked for."""
        ...

    def losses(self, model: nn.Module, examples: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the examples' losses, with its graph, and sums of other measures without one."""
        ...

    def weight(self, examples: Tensor) -> float:
        """What the sums of `losses` are divided by: the number of examples, or of their tokens."""
        ...

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Measures on the test set, the same in all processes."""
        ...

    def observe(self, model: nn.Module) -> dict[str, Any]:
        """What attention does on a fixed sample: `columns` and `layers`, as `observation.observe` gives them."""
        ...


@runtime_checkable
class HasFiles(Protocol):
    """A task whose model needs further files."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files to write beside the trained model, by name: what using it needs, such as vocabularies."""
        ...
