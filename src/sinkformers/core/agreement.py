"""How far two computations of the same numbers are apart, and how far rounding may take them."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Deviation(NamedTuple):
    """The worst difference among some tensors, relative to the largest entry of its tensor; NaN where one is NaN."""

    size: float
    name: str

    def exceeds(self, tolerance: float) -> bool:
        return not self.size <= tolerance  # NaN exceeds everything


def deviation(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Deviation:
    """The worst difference between tensors of the same names. Equal infinities agree."""
    if got.keys() != exact.keys():
        return Deviation(float("nan"), ", ".join(got.keys() ^ exact.keys()))
    worst = Deviation(0.0, next(iter(exact), ""))
    for name, theirs in exact.items():
        ours = got[name].detach().to("cpu", torch.float64)
        theirs = theirs.detach().to("cpu", torch.float64)
        if ours.shape != theirs.shape:
            return Deviation(float("nan"), name)
        if theirs.numel() == 0:
            continue
        apart = torch.where(ours == theirs, 0.0, (ours - theirs).abs())
        largest = torch.where(theirs.isfinite(), theirs.abs(), 0.0).max().item()
        size = apart.max().item() / (largest or 1.0)
        if not size <= worst.size:
            worst = Deviation(size, name)
            if size != size:
                return worst
    return worst


def tolerance(dtype: torch.dtype, n: int, m: int, n_iters: int, largest_score: float = 0.0) -> float:
    """How far rounding may take an output or a gradient of `n_iters` steps from float64, relative to its largest entry.

    The steps run in float32 at least. Each commits the rounding of a sum, √max(n, m)·eps, and these errors add up; the
    gradient is a sum over the steps of products with what they found, so that they are counted once more for each.
    Scores that are larger than √max(n, m) carry an error of their own, eps times their size, into every step.
    Tokens in half precision add roundings of their own, four in a row at most: of the incoming gradient, of the weights
    or the gradient of the scores before a product, and of its result.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    steps = (n_iters + 1) ** 2 * max(max(n, m) ** 0.5, largest_score) * torch.finfo(working).eps
    return steps if dtype == working else steps + 4 * torch.finfo(dtype).eps
