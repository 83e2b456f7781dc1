"""Densities in closed form: their score ∇ρ/ρ, samples, and weighted particles on a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sinkformers.core import checks as core_checks
from sinkformers.flows import checks
from sinkformers.flows.measure import Measure


class Density(Protocol):
    """The methods of a density on R^d that the limits use; points are (n, d)."""

    def log(self, points: Tensor) -> Tensor:
        """`log ρ` (n,)"""
        ...

    def score(self, points: Tensor) -> Tensor:
        """`∇ρ/ρ` (n, d)"""
        ...


@dataclass(frozen=True, eq=False)
class Gaussian:
    """The normal distribution with mean (d,) and covariance (d, d).

    Examples:
        >>> import torch
        >>> from sinkformers.flows import Gaussian
        >>> Gaussian.centred(torch.eye(2)).score(torch.tensor([[1.0, 2.0]])).tolist()
        [[-1.0, -2.0]]
    """

    mean: Tensor
    covariance: Tensor

    def __post_init__(self) -> None:
        core_checks.one_device("Gaussian", "mean", self.mean, covariance=self.covariance)
        checks.matrix("Gaussian", "covariance", self.covariance, (len(self.mean), len(self.mean)))
        checks.positive_definite("Gaussian", "covariance", self.covariance)

    @classmethod
    def centred(cls, covariance: Tensor) -> Gaussian:
        return cls(covariance.new_zeros(covariance.shape[-1]), covariance)

    @property
    def dim(self) -> int:
        return len(self.mean)

    def log(self, points: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(self.covariance)
        scaled = torch.linalg.solve_triangular(factor, (points - self.mean).mT, upper=False)
        return -scaled.square().sum(0) / 2 - factor.diagonal().log().sum() - self.dim * math.log(2 * math.pi) / 2

    def score(self, points: Tensor) -> Tensor:
        return -torch.linalg.solve(self.covariance, (points - self.mean).mT).mT

    def sample(self, n: int, generator: torch.Generator) -> Measure:
        noise = torch.randn(n, self.dim, generator=generator, dtype=self.mean.dtype)
        return Measure.uniform(self.mean + noise @ torch.linalg.cholesky(self.covariance).mT)

    def quadrature(self, per_axis: int, *, reach: float = 7.0) -> Measure:
        """Return the midpoints of a grid over ±`reach` standard deviations along the principal axes, with weights."""
        values, vectors = torch.linalg.eigh(self.covariance)
        unit = midpoints(per_axis, self.dim, dtype=self.mean.dtype) * reach
        return _weighted(self, self.mean + unit * values.sqrt() @ vectors.mT)


@dataclass(frozen=True)
class Bump:
    """`ρ ∝ Π_k (1 − x_k²)^power` on [−1, 1]^dim: compact support, and `power − 1` continuous derivatives on R^d.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import Bump
        >>> round(Bump(4).score(torch.tensor([[0.5]])).item(), 4)  # −8x/(1 − x²)
        -5.3333
    """

    power: int = 4
    dim: int = 1

    def __post_init__(self) -> None:
        if self.power < 1 or self.dim < 1:
            raise ValueError(f"Bump: power and dim must be whole numbers ≥ 1; got {self.power!r} and {self.dim!r}.")

    def log(self, points: Tensor) -> Tensor:
        k = self.power
        total = math.lgamma(2 * k + 2) - 2 * math.lgamma(k + 1) - (2 * k + 1) * math.log(2)  # for one axis
        inside = (1 - points.square()).clamp_min(0)
        return (k * inside.log() + total).sum(-1)

    def score(self, points: Tensor) -> Tensor:
        """`∇ρ/ρ` (n, d) at points inside the support."""
        return -2 * self.power * points / (1 - points.square())

    def sample(self, n: int, generator: torch.Generator) -> Measure:
        """Draw n points, as medians of 2·power + 1 uniform numbers, which have this density."""
        draws = torch.rand(n, self.dim, 2 * self.power + 1, generator=generator, dtype=torch.float64)
        return Measure.uniform(2 * draws.median(-1).values - 1)

    def quadrature(self, per_axis: int) -> Measure:
        """Return the midpoints of a grid over the support, with weights."""
        return _weighted(self, midpoints(per_axis, self.dim))


def midpoints(per_axis: int, dim: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the centres (per_axis^dim, dim) of equal cells of [−1, 1]^dim; the last axis varies fastest."""
    if per_axis < 1:
        raise ValueError(f"midpoints: per_axis must be a whole number ≥ 1; got {per_axis!r}.")
    axis = (2 * torch.arange(per_axis, dtype=dtype) + 1) / per_axis - 1
    return torch.cartesian_prod(*[axis] * dim).reshape(-1, dim)


def _weighted(density: Density, points: Tensor) -> Measure:
    return Measure(points, density.log(points).softmax(0))
