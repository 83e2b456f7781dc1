"""Metrics of classifiers of images, shapes and texts: accuracy and loss over all test examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the number of examples whose label has the largest logit."""
    return (logits.detach().argmax(-1) == labels).sum().double()


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of cross-entropies."""
    return F.cross_entropy(logits, labels, reduction="sum")


@torch.no_grad()
def measured(
    answer: Callable[[Tensor], tuple[Tensor, Tensor]],
    batches: Iterable[Tensor],
    n: int,
    accelerator: Accelerator,
    loss: Callable[[Tensor, Tensor], Tensor] = entropy,
) -> dict[str, float]:
    """Return accuracy and mean loss over n examples.

    `answer` returns the logits and labels of a batch. `batches` are those of this process; together, the processes have
    every example once.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for examples in batches:
        logits, labels = answer(examples)
        sums += torch.stack([hits(logits, labels), loss(logits, labels)])
    accuracy, mean = (torch.as_tensor(accelerator.reduce(sums)) / n).tolist()
    return {"accuracy": accuracy, "loss": mean}
