"""Measures: moments, moves, samples and quadrature of densities."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers.flows import Bump, Gaussian, Measure
from tests.flows_problems import normal, weighted


def test_moments_are_those_of_the_weights():
    measure = Measure(torch.tensor([[0.0, 0], [4, 0], [0, 4]]).double(), torch.tensor([0.5, 0.25, 0.25]).double())
    assert measure.mean().tolist() == [1, 1]
    assert measure.covariance().tolist() == [[3, -1], [-1, 3]]
    assert measure.norm(measure.points) == pytest.approx(8**0.5, rel=4e-16)  # two roundings


def test_uniform_weights_and_moves():
    measure = Measure.uniform(normal(7, 3))
    assert_close(measure.weights, torch.full((7,), 1 / 7, dtype=torch.float64))
    assert measure.dim == 3
    assert len(measure) == 7
    moved = weighted(7, 3).moved(normal(7, 3, seed=4))
    assert_close(moved.points, normal(7, 3, seed=4))
    assert_close(moved.weights, weighted(7, 3).weights)


def test_quadrature_has_the_moments_of_its_density():
    """The variance of ρ ∝ (1 − x²)^p is 1/(2p + 3). Midpoints err by the density's tail and lack of smoothness."""
    for dim, per_axis in ((1, 101), (2, 61)):
        covariance = Bump(4, dim).quadrature(per_axis).covariance()
        assert_close(covariance, torch.eye(dim, dtype=torch.float64) / 11, atol=1e-8, rtol=0)
    mean, covariance = normal(2), torch.tensor([[1.3, 0.4], [0.4, 0.7]]).double()
    grid = Gaussian(mean, covariance).quadrature(41)
    assert_close(grid.mean(), mean, atol=1e-9, rtol=0)
    assert_close(grid.covariance(), covariance, atol=1e-8, rtol=0)


def test_samples_have_the_moments_of_their_density():
    n = 40_000  # the standard error of a variance is √(2/n) of it at most
    for density, covariance in (
        (Bump(4, 2), torch.eye(2).double() / 11),
        (Gaussian.centred(torch.tensor([[1.3, 0.4], [0.4, 0.7]]).double()), torch.tensor([[1.3, 0.4], [0.4, 0.7]])),
    ):
        sample = density.sample(n, torch.Generator().manual_seed(3))
        assert (sample.covariance() - covariance).abs().max() < 5 * (2 / n) ** 0.5 * covariance.max()
        assert sample.mean().abs().max() < 5 * (covariance.max() / n) ** 0.5


def test_scores_are_gradients_of_the_logarithm_and_densities_have_mass_one():
    gaussian = Gaussian(normal(2), torch.tensor([[1.3, 0.4], [0.4, 0.7]]).double())
    for density, box, points in ((Bump(3, 2), 1.0, normal(5, 2) / 5), (gaussian, 9.0, normal(5, 2))):
        points.requires_grad_()
        (gradient,) = torch.autograd.grad(density.log(points).sum(), points)
        assert_close(density.score(points.detach()), gradient, atol=1e-12, rtol=1e-12)
        axis = torch.linspace(-box, box, 1001, dtype=torch.float64)
        values = density.log(torch.cartesian_prod(axis, axis)).exp()
        assert_close(
            values.sum() * (axis[1] - axis[0]) ** 2, torch.ones(()).double(), atol=1e-6, rtol=0
        )  # the error of the trapezoidal rule
