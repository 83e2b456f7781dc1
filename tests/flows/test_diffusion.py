"""The equations of the limits: exact Gaussians, conservation of mass, and orders in the width of a cell."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers.flows import (
    Bump,
    Gaussian,
    Grid,
    Projections,
    ScoreVelocity,
    gaussian_path,
    heat,
    score_flow,
    sinkformer_limit,
    transformer_limit,
)
from tests.flows_problems import normal, order

EXACT = 1e-12  # float64: sums over up to 3,721 cells of mass 1 in all, 4e3 roundings
W_KEY = torch.tensor([[1.0, 0.3], [-0.2, 0.9]], dtype=torch.float64)
W_QUERY = torch.tensor([[0.8, 0.1], [0.0, 0.9]], dtype=torch.float64)


def isotropic(dim, variance):
    return Gaussian.centred(variance * torch.eye(dim, dtype=torch.float64))


@pytest.mark.parametrize(("dim", "cells"), [(1, (31, 61, 121)), (2, (31, 47, 61))])
def test_heat_spreads_a_gaussian(dim, cells):
    """The variance grows by 2ct; the error falls with the square of a cell's width."""
    errors = []
    for n in cells:
        grid = Grid(reach=6.0, cells=n, dim=dim)
        path = heat(grid, grid.density(isotropic(dim, 0.5)), (0.0, 0.8), coefficient=0.5)
        errors.append((path.densities[1] - grid.density(isotropic(dim, 0.5 + 0.8))).abs().max().item())
        assert grid.mass(path.densities[1]) == pytest.approx(1, abs=EXACT)
    assert order(cells, errors) == pytest.approx(-2, abs=0.2)  # the next order is 4: it bends the slope by a tenth


def test_heat_in_a_closed_box_becomes_uniform():
    grid = Grid(reach=1.0, cells=51)
    path = heat(grid, grid.density(Bump()), (0.0, 0.1, 50.0), coefficient=1.0)
    assert_close(path.densities[-1], torch.full((51,), 0.5, dtype=torch.float64), atol=EXACT, rtol=0)
    assert (path.densities >= 0).all()


def test_the_score_flow_of_theorem_1_is_the_heat_equation():
    grid = Grid(reach=5.0, cells=81)
    start = grid.density(isotropic(1, 0.6))
    velocity = sinkformer_limit(Projections.tied(torch.eye(1, dtype=torch.float64)))
    flowed = score_flow(grid, start, (0.0, 0.5), velocity=velocity).densities[1]
    heated = heat(grid, start, (0.0, 0.5), coefficient=0.5).densities[1]
    # Different second-order schemes: each is within C·width² of the truth.
    assert (flowed - heated).abs().max() < 0.2 * grid.width**2
    twice = heat(grid, start, (0.0, 0.5), coefficient=1.0).densities[1]
    assert (flowed - twice).abs().max() > 5 * (flowed - heated).abs().max()


@pytest.mark.parametrize(("dim", "cells"), [(1, (31, 61, 121)), (2, (21, 29, 37))])
def test_proposition_4_moves_a_gaussian_as_its_moments_do(dim, cells):
    """A nonlocal equation: W_K⁻¹W_Q is not the identity. The boundary is five deviations away."""
    projections = Projections.tied(W_QUERY[:dim, :dim], W_KEY[:dim, :dim])
    velocity = transformer_limit(projections)
    start = isotropic(dim, 0.7)
    (_, end) = gaussian_path(start, velocity, (0.0, 0.2))
    errors = []
    for n in cells:
        grid = Grid(reach=6.0 - dim / 2, cells=n, dim=dim)
        path = score_flow(grid, grid.density(start), (0.0, 0.2), velocity=velocity)
        assert grid.mass(path.densities[1]) == pytest.approx(1, abs=100 * EXACT)  # over some hundred steps
        errors.append((path.densities[1] - grid.density(end)).abs().max().item())
    assert order(cells, errors) < -1.7  # errors on coarse grids in the plane fall faster


def test_a_local_equation_has_its_anisotropic_solution():
    """Any W_V: ∂_t ρ = −div(D∇ρ), the covariance grows by −t(D + Dᵀ)."""
    mobility = -torch.tensor([[0.5, 0.1], [0.1, 0.25]], dtype=torch.float64)
    velocity = ScoreVelocity(mobility, torch.eye(2, dtype=torch.float64))
    grid, start = Grid(reach=4.5, cells=29, dim=2), isotropic(2, 0.7)
    path = score_flow(grid, grid.density(start), (0.0, 0.3), velocity=velocity)
    end = Gaussian.centred(start.covariance - 0.3 * (mobility + mobility.T))
    assert (path.densities[1] - grid.density(end)).abs().max() < 0.2 * grid.width**2


def test_the_mean_of_an_asymmetric_density_does_not_move():
    """The heat equation keeps the mean while the density is far from the boundary."""
    grid = Grid(reach=12.0, cells=241)
    lopsided = Gaussian(normal(1), torch.eye(1).double() / 3)
    centres = grid.centres()[:, 0]
    path = heat(grid, grid.density(lopsided), (0.0, 1.0), coefficient=0.5)
    means = (path.densities * centres).sum(1) * grid.width
    assert means[1].item() == pytest.approx(means[0].item(), abs=1e-9)  # rounding; the boundary is ten deviations away
