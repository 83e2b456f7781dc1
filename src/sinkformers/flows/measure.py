"""Probability measures as weighted particles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformers.core import checks as core_checks
from sinkformers.flows import checks


@dataclass(frozen=True, eq=False)
class Measure:
    """`μ = Σ_i w_i δ(x_i)`: positions (n, d), and weights (n,) that are non-negative and sum to 1.

    Particles may coincide; two at the same position are equivalent to one with the sum of their weights, for every map
    and energy. A particle of weight zero has no effect on others, but is moved.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import Measure
        >>> measure = Measure.uniform(torch.tensor([[0.0], [1.0], [2.0]]))
        >>> measure.mean().item(), round(measure.covariance().item(), 4)
        (1.0, 0.6667)
    """

    points: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        checks.points("Measure", "points", self.points)
        core_checks.one_device("Measure", "points", self.points, weights=self.weights)
        checks.weights("Measure", self.weights, len(self.points))

    @classmethod
    def uniform(cls, points: Tensor) -> Measure:
        """Return the measure with equal weights, as the tokens of a sequence have."""
        checks.points("Measure.uniform", "points", points)
        n = len(points)
        return cls(points, torch.full((n,), 1 / n, dtype=points.dtype, device=points.device))

    @property
    def dim(self) -> int:
        return self.points.shape[1]

    def __len__(self) -> int:
        return len(self.points)

    def moved(self, points: Tensor) -> Measure:
        """Return a measure with the same weights at other points."""
        return Measure(points, self.weights)

    def support(self) -> Measure:
        """Return the measure without particles of weight zero."""
        kept = self.weights > 0
        return self if bool(kept.all()) else Measure(self.points[kept], self.weights[kept])

    def integrate(self, values: Tensor) -> Tensor:
        """Return `∫ v dμ` for values (n, …) at the particles."""
        return torch.einsum("n,n...->...", self.weights, values)

    def norm(self, values: Tensor) -> float:
        """Return `(∫ |v|² dμ)^½`, the norm of L²(μ), for values (n, d) at the particles."""
        return self.integrate(values.square().sum(-1)).sqrt().item()

    def mean(self) -> Tensor:
        """Return the mean (d,)."""
        return self.integrate(self.points)

    def covariance(self) -> Tensor:
        """Return the covariance (d, d) of μ itself, without correction for small samples."""
        centred = self.points - self.mean()
        return (centred * self.weights[:, None]).mT @ centred
