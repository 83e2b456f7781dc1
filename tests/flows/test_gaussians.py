"""Closed forms compared with quadrature, which is independent of them."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers.flows import (
    AttentionMap,
    Gaussian,
    Projections,
    energy_infinity,
    energy_infinity_of_gaussian,
    energy_zero,
    energy_zero_of_gaussian,
    gaussian_path,
    integrate,
    sinkformer_limit,
    sinkhorn_of_gaussian,
    softmax_of_gaussian,
    transformer_limit,
)
from tests.flows_problems import general, normal, tied

COVARIANCE = torch.tensor([[1.3, 0.4], [0.4, 0.7]], dtype=torch.float64)
SHIFTED = Gaussian(torch.tensor([0.3, -0.2], dtype=torch.float64), COVARIANCE)
PLACES = normal(5, 2, seed=3)
# Seven standard deviations leave exp(−24.5) = 2e-11 of the density outside the grid; the maps weigh it with x/ε.
TAIL = 2e-9
EXACT = 1e-12  # float64: products and decompositions of small matrices of order 1, 4e3 roundings


@pytest.mark.parametrize("make", [general, tied])
@pytest.mark.parametrize("eps", [1.0, 0.6])
def test_sinkhorns_map_of_a_gaussian(make, eps):
    projections = make(2, 2)
    field = AttentionMap(projections, eps=eps)(SHIFTED.quadrature(29))
    assert_close(field(PLACES), sinkhorn_of_gaussian(SHIFTED, projections, eps=eps)(PLACES), atol=TAIL, rtol=0)


@pytest.mark.parametrize("eps", [1.0, 0.4])
def test_the_recentred_map_of_a_gaussian(eps):
    projections = tied(2, 2)
    field = AttentionMap(projections, eps=eps, recentred=True)(SHIFTED.quadrature(37))
    closed = sinkhorn_of_gaussian(SHIFTED, projections, eps=eps, recentred=True)
    assert_close(field(PLACES), closed(PLACES), atol=TAIL, rtol=0)
    raw = sinkhorn_of_gaussian(SHIFTED, projections, eps=eps)
    assert_close(closed(PLACES), raw(PLACES) - PLACES @ projections.value.T / eps, atol=EXACT, rtol=0)


@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("eps", [2.0, 0.8])
def test_softmaxs_map_of_a_gaussian(cost, eps):
    projections, near = general(2, 2), PLACES / 4  # "dot" moves the mean by Σ W_KᵀW_Q x/ε: stay on the grid
    field = AttentionMap(projections, eps=eps, cost=cost, n_iters=1)(SHIFTED.quadrature(41))
    closed = softmax_of_gaussian(SHIFTED, projections, eps=eps, cost=cost)
    assert_close(field(near), closed(near), atol=TAIL, rtol=0)


def test_softmaxs_recentred_map_of_a_gaussian():
    projections = general(2, 2)
    field = AttentionMap(projections, eps=0.8, cost="l2", n_iters=1, recentred=True)(SHIFTED.quadrature(41))
    closed = softmax_of_gaussian(SHIFTED, projections, eps=0.8, recentred=True)
    assert_close(field(PLACES / 4), closed(PLACES / 4), atol=TAIL, rtol=0)


def test_one_dimension_is_the_known_formula():
    """κ = (ε/2a)(−1 + √(1 + 4a²σ⁴/ε²)), T̄ = (a/ε)(1 − κ/σ²) x."""
    variance, a = 0.7, 1.9
    one = torch.ones(1, 1, dtype=torch.float64)
    for eps in (2.0, 0.3):
        kappa = eps / (2 * a) * (-1 + math.sqrt(1 + 4 * a**2 * variance**2 / eps**2))
        closed = sinkhorn_of_gaussian(
            Gaussian.centred(variance * one), Projections.tied(math.sqrt(a) * one), eps=eps, recentred=True
        )
        assert closed.matrix.item() == pytest.approx(a / eps * (1 - kappa / variance), rel=EXACT)


def test_energies_of_a_gaussian():
    projections = tied(2, 2)
    for eps in (1.0, 0.4):
        found = energy_infinity(SHIFTED.quadrature(37), projections, eps=eps).item()
        assert energy_infinity_of_gaussian(SHIFTED, projections, eps=eps) == pytest.approx(found, abs=TAIL)
    centred = Gaussian.centred(COVARIANCE)
    found = energy_zero(centred.quadrature(61, reach=9.0), projections, eps=8.0).item()
    assert energy_zero_of_gaussian(centred, projections, eps=8.0) == pytest.approx(
        found, abs=1e-8
    )  # exp(scores) lifts the tail
    assert energy_zero_of_gaussian(centred, projections, eps=0.05) == math.inf


def test_the_closed_map_is_the_gradient_of_the_closed_energy():
    """dF^∞/dt along ẋ = T^∞(x) is −∫|T^∞|² dμ: both closed forms agree, in seven dimensions."""
    d = 7
    spread = normal(d, d)
    density = Gaussian.centred(spread @ spread.T / d + torch.eye(d).double() / 3)
    projections = tied(d, d, seed=2)
    matrix = sinkhorn_of_gaussian(density, projections).matrix
    h = 1e-5  # the difference errs by h² and by eps/h, both below 1e-7
    after, before = (
        energy_infinity_of_gaussian(
            Gaussian.centred((s := torch.eye(d).double() + sign * h * matrix) @ density.covariance @ s.T), projections
        )
        for sign in (1, -1)
    )
    assert (after - before) / (2 * h) == pytest.approx(
        -(matrix @ density.covariance @ matrix.T).trace().item(), rel=1e-7
    )


def test_gaussians_stay_gaussian_under_the_limits():
    """The covariance of ∂_t ρ = ½Δρ grows by t; elsewhere mean and covariance follow the velocity of single points."""
    path = gaussian_path(SHIFTED, sinkformer_limit(tied(2, 2)), (0.0, 0.7))
    assert_close(path[1].covariance, COVARIANCE + 0.7 * torch.eye(2).double(), atol=EXACT, rtol=0)
    velocity = transformer_limit(
        Projections.tied(normal(2, 2, seed=5) / 4 + torch.eye(2).double(), torch.eye(2).double())
    )
    ends = gaussian_path(SHIFTED, velocity, (0.0, 0.05, 0.1))

    # Move points with the score of the Gaussian at each time: affine images of Gaussians are Gaussian.
    def rates(state):
        points, mean, covariance = state[:3], state[3], state[4:]
        grown = velocity.mobility @ torch.linalg.inv(covariance)
        at = lambda x: -(x @ velocity.pull.T - mean) @ grown.T  # noqa: E731
        change = -grown @ velocity.pull @ covariance
        return torch.cat([at(points), at(mean[None]), change + change.T])

    frame = torch.tensor([[0.0, 0], [1, 0], [0, 1]]).double()
    state = torch.cat([frame, SHIFTED.mean[None], COVARIANCE])
    final = integrate(rates, state, (0.0, 0.1), rtol=1e-11, atol=1e-11).states[-1]
    linear = (final[1:3] - final[:1]).T
    # Both are integrated to 1e-11 or better.
    assert_close(linear @ COVARIANCE @ linear.T, ends[-1].covariance, atol=1e-8, rtol=0)
    assert_close(linear @ SHIFTED.mean + final[0], ends[-1].mean, atol=1e-8, rtol=0)
