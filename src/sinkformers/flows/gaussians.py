"""Closed forms of attention maps and energies for Gaussians, in any dimension.

Between N(m, Σ) and itself the coupling with density `exp(xᵀAx'/ε + f(x) + g(x'))` is Gaussian, and −A/ε is the block
of its precision that couples x and x'. With `S = Σ^½`, and `S R S` the covariance of x and x', this means
`R(1 − RᵀR)⁻¹ = SAS/ε`: R has the singular vectors of SAS/ε, and a singular value m of it becomes
`r = 2m/(1 + √(1 + 4m²))`. A may be any matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformers.core import checks as core_checks
from sinkformers.flows import checks
from sinkformers.flows.densities import Gaussian
from sinkformers.flows.integrators import integrate
from sinkformers.flows.limits import ScoreVelocity
from sinkformers.flows.projections import Cost, Projections


class Affine(NamedTuple):
    """`x ↦ matrix x + offset`, of points (n, d)."""

    matrix: Tensor
    offset: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        return points @ self.matrix.mT + self.offset


def sinkhorn_of_gaussian(
    density: Gaussian, projections: Projections, *, eps: float = 1.0, recentred: bool = False
) -> Affine:
    """Return T^∞ of a Gaussian, or T̄^∞ = T^∞ − (1/ε) W_V x, computed without cancellation.

    Examples:
        >>> import torch
        >>> from sinkformers.flows import Gaussian, Projections, sinkhorn_of_gaussian
        >>> one = torch.eye(1, dtype=torch.float64)
        >>> recentred = sinkhorn_of_gaussian(Gaussian.centred(one), Projections.tied(one), eps=1e-6, recentred=True)
        >>> round(recentred.matrix.item(), 6)  # half of −∇ρ/ρ = x
        0.5
    """
    core_checks.positive("sinkhorn_of_gaussian", "eps", eps)
    root, inverse = _roots(density.covariance)
    left, m, right = torch.linalg.svd(root @ projections.interaction @ root / eps)
    if recentred:
        checks.symmetric("sinkhorn_of_gaussian", "W_QᵀW_K", projections.interaction)
        signs = (left * right.mT).sum(0)  # ±1: the sign of an eigenvalue, where singular vectors are eigenvectors
        if not (signs > 0.5).all():
            checks.positive_definite("sinkhorn_of_gaussian", "W_QᵀW_K", projections.interaction)
        grown = (1 + 4 * m.square()).sqrt()
        gap = (left * ((1 + 1 / (grown + 2 * m)) / (1 + grown))) @ left.mT  # 1 − R
        matrix = -projections.value @ root @ gap @ inverse / eps
        return Affine(matrix, -(density.mean @ matrix.mT))
    pull = root @ (right.mT * _correlation(m)) @ left.mT @ inverse  # E[x' | x] = mean + pull (x − mean)
    offset = (density.mean - density.mean @ pull.mT) @ projections.value.mT / eps
    return Affine(projections.value @ pull / eps, offset)


def softmax_of_gaussian(
    density: Gaussian,
    projections: Projections,
    *,
    eps: float = 1.0,
    cost: Cost = "l2",
    recentred: bool = False,
) -> Affine:
    """Return T¹ of a Gaussian; with cost "l2" also T̄¹ = T¹ − (1/ε) W_V W_K⁻¹W_Q x.

    SoftMax reweights N(m, Σ) to another Gaussian: with "l2" its precision is `Σ⁻¹ + W_KᵀW_K/ε`; with "dot" it has the
    same Σ, and its mean moves by `ΣW_KᵀW_Q x/ε`.
    """
    caller = "softmax_of_gaussian"
    core_checks.positive(caller, "eps", eps)
    core_checks.one_of(caller, "cost", cost, ("dot", "l2"))
    mean, covariance, value = density.mean, density.covariance, projections.value
    queries = projections.key.mT @ projections.query
    if cost == "dot":
        if recentred:
            raise ValueError(f'{caller}: the recentred map needs cost="l2"; with "dot" it may have no limit.')
        return Affine(value @ covariance @ queries / eps**2, value @ mean / eps)
    # (Σ⁻¹ + G/ε)⁻¹(Σ⁻¹m + W_KᵀW_Q x/ε) = (ε + ΣG)⁻¹(εm + ΣW_KᵀW_Q x)
    system = eps * torch.eye(density.dim, dtype=mean.dtype) + covariance @ projections.key.mT @ projections.key
    if not recentred:
        return Affine(
            value @ torch.linalg.solve(system, covariance @ queries) / eps, value @ torch.linalg.solve(system, mean)
        )
    checks.invertible(caller, "W_K", projections.key)
    matrix = value @ torch.linalg.inv(system)
    return Affine(-matrix @ torch.linalg.solve(projections.key, projections.query), matrix @ mean)


def energy_zero_of_gaussian(density: Gaussian, projections: Projections, *, eps: float = 1.0) -> float:
    """Return F⁰ of a centred Gaussian with dot-product scores: `½ det(1 − MMᵀ)^−½`, or infinity if |M| ≥ 1.

    M is SAS/ε.
    """
    _refuse_mean("energy_zero_of_gaussian", density)
    m = _strengths(density, projections, eps)
    return float("inf") if m.max() >= 1 else 0.5 * (1 - m.square()).prod().rsqrt().item()


def energy_infinity_of_gaussian(density: Gaussian, projections: Projections, *, eps: float = 1.0) -> float:
    """Return F^∞ with dot-product scores: `½ Σ (m r + ½ log(1 − r²))` over singular values, plus `mᵀAm/2ε`."""
    core_checks.positive("energy_infinity_of_gaussian", "eps", eps)
    m = _strengths(density, projections, eps)
    r = _correlation(m)
    centred = (m * r + torch.log1p(-r.square()) / 2).sum() / 2
    return (centred + density.mean @ projections.interaction @ density.mean / (2 * eps)).item()


def gaussian_path(density: Gaussian, velocity: ScoreVelocity, times: Sequence[float]) -> list[Gaussian]:
    """Return the solution of `∂_t ρ + div(ρ D (∇ρ/ρ)(B·)) = 0` that starts from a Gaussian, at each of `times`.

    It stays Gaussian. If B = 1 the covariance is `Σ − t(D + Dᵀ)`; otherwise mean and covariance satisfy an ordinary
    differential equation, which is solved to 1e-12.
    """
    mobility, pull = velocity
    start, dim = times[0], density.dim
    if torch.equal(pull, torch.eye(dim, dtype=pull.dtype)):
        spread = mobility + mobility.mT
        return [Gaussian(density.mean, density.covariance - (t - start) * spread) for t in times]

    def rates(state: Tensor) -> Tensor:
        mean, covariance = state[0], state[1:]
        grow = -mobility @ torch.linalg.solve(covariance, pull)
        shift = mobility @ torch.linalg.solve(covariance, mean)
        change = grow @ covariance
        return torch.cat([(grow @ mean + shift)[None], change + change.mT])

    path = integrate(rates, torch.cat([density.mean[None], density.covariance]), times, rtol=1e-12, atol=1e-12)
    return [Gaussian(state[0], (state[1:] + state[1:].mT) / 2) for state in path.states]


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.sqrt()) @ vectors.mT, (vectors * values.rsqrt()) @ vectors.mT


def _strengths(density: Gaussian, projections: Projections, eps: float) -> Tensor:
    root, _ = _roots(density.covariance)
    return torch.linalg.svdvals(root @ projections.interaction @ root / eps)


def _correlation(m: Tensor) -> Tensor:
    return 2 * m / (1 + (1 + 4 * m.square()).sqrt())


def _refuse_mean(caller: str, density: Gaussian) -> None:
    if density.mean.abs().max() > 0:
        raise ValueError(f"{caller}: mean must be zero; got {density.mean.tolist()}. Gaussian.centred makes one.")
