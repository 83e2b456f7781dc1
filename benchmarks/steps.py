"""What is timed: one call after another of the same function on the same inputs."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Unavailable(Exception):
    """A row that cannot be timed, with its reason."""


class Step(Protocol):
    def reset(self) -> None:
        """Forget the last call; not timed."""
        ...

    def call(self) -> None:
        """The call that is timed."""
        ...

    def outcome(self) -> Sequence[Tensor]:
        """The output of the last call and its gradients."""
        ...


class TorchStep:
    """A function of tensors, forward alone (`grad` None, no graph kept) or forward and backward."""

    def __init__(self, function: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor | None) -> None:
        self.function, self.grad = function, grad
        self.tensors = [x.detach().requires_grad_(grad is not None) for x in tensors]
        self.out: Tensor | None = None

    def reset(self) -> None:
        self.out = None
        for tensor in self.tensors:
            tensor.grad = None

    def call(self) -> None:
        if self.grad is None:
            with torch.no_grad():
                self.out = self.function(*self.tensors)
            return
        self.out = self.function(*self.tensors)
        self.out.backward(self.grad)

    def outcome(self) -> list[Tensor]:
        assert self.out is not None
        gradients = [] if self.grad is None else [x.grad for x in self.tensors if x.grad is not None]
        return [self.out.detach(), *gradients]
