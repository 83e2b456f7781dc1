"""What the expectations of all functions share: float64 copies, and the rounding of a result."""

from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing.bounds import SAFETY, Rounding
from fuzzing.case import Case


class Expected(NamedTuple):
    value: Tensor
    tolerance: Tensor


Tensors = dict[str, Tensor]


def is_softmax(case: Case) -> bool:
    return not isinstance(case.tau, str) and (case.n_iters == 1 or case.tau == 0)


def working(case: Case) -> Rounding:
    """The precision of the iterations: float32 at least, except where torch's own SoftMax attention serves."""
    dtype = getattr(torch, case.dtype)
    if case.function == "sinkhorn_attention" and case.backend == "auto" and is_softmax(case) and case.cost == "dot":
        return Rounding.of(dtype)._replace(eps=torch.finfo(dtype).eps)
    return Rounding.of(dtype)


def tau_of(case: Case, tensors: Tensors) -> Tensor:
    """Of each matrix (…)."""
    given = tensors["tau"].double() if "tau" in tensors else torch.tensor(float(case.tau), dtype=torch.float64)
    return given.expand(case.lead)


def clean(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, x, 0.0)


class Leaves:
    """Float64 copies of the tensors, the names of those with a gradient, and how gradients and tolerances are cast."""

    def __init__(self, tensors: Tensors, wanted: list[str]) -> None:
        self.given, self.wanted = tensors, [name for name in wanted if name in tensors]
        self.exact = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
        for name in self.wanted:
            self.exact[name] = self.exact[name].detach().clone().requires_grad_()

    def __getitem__(self, name: str) -> Tensor:
        return self.exact[name]

    def get(self, name: str) -> Tensor | None:
        return self.exact.get(name)

    def gradients(self, outputs: list[Tensor], weights: list[Tensor]) -> Tensors:
        inputs = [self.exact[name] for name in self.wanted]
        found = torch.autograd.grad(outputs, inputs, weights, allow_unused=True, materialize_grads=True)
        return dict(zip(self.wanted, found, strict=True))

    def rounded(self, name: str, value: Tensor, error: Tensor) -> Expected:
        """The tolerance of a result in the dtype of a tensor: the error, and one rounding."""
        info = torch.finfo(self.given[name].dtype)
        tolerance = SAFETY * error + info.eps * value.abs()
        # Without an error there is nothing to round: what is masked gives exact zeros.
        tolerance = torch.where(tolerance > 0, tolerance + 4 * info.smallest_normal, 0.0)
        return Expected(value.detach(), tolerance.detach())


def reduced(error: Tensor, shape: torch.Size) -> Tensor:
    return error.sum_to_size(shape) if error.shape != shape else error
