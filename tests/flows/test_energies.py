"""Proposition 2: T⁰ and T^∞ are Wasserstein gradients, exactly, for finitely many particles."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_limit
from sinkformers.flows import AttentionMap, Measure, Projections, energy_infinity, energy_zero
from tests.flows_problems import general, indefinite, normal, tied, weighted

# float64. The limit is computed to a residual of 1e-13 or 1e-11; dividing by weights of 0.02 and by ε amplifies it.
CLOSE, LIMIT = 1e-10, 1e-9


def gradient(energy, measure, *arguments, **options):
    """Return ∂F/∂x_i divided by the weight of the particle."""
    points = measure.points.clone().requires_grad_()
    (grad,) = torch.autograd.grad(energy(measure.moved(points), *arguments, **options), points)
    return grad / measure.weights[:, None]


def definition(measure, projections, eps, cost):
    """Return −½ ∫ k log(k/k⁰) d(μ⊗μ), with `sinkhorn_limit`."""
    queries, keys = measure.points @ projections.query.T, measure.points @ projections.key.T
    scores = queries @ keys.T / eps if cost == "dot" else -torch.cdist(queries, keys).square() / (2 * eps)
    mass = measure.weights
    weights = sinkhorn_limit(scores, row_mass=mass, col_mass=mass, tol=1e-13, max_iters=100_001)
    kernel = weights / mass
    return -0.5 * (mass @ (kernel * (kernel.log() - scores)) @ mass)


@pytest.mark.parametrize("make", [tied, lambda _k, d: indefinite(d)])
@pytest.mark.parametrize("eps", [1.0, 0.6])
def test_maps_are_gradients_of_energies(make, eps):
    measure, projections = weighted(13, 3), make(5, 3)
    x = measure.points
    field = AttentionMap(projections, eps=eps, n_iters=0)(measure)
    assert_close(gradient(energy_zero, measure, projections, eps=eps), -field(x), atol=CLOSE, rtol=CLOSE)
    field = AttentionMap(projections, eps=eps, tol=1e-13)(measure)
    assert_close(gradient(energy_infinity, measure, projections, eps=eps, tol=1e-13), -field(x), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("make", [general, tied])
def test_the_energy_matches_its_definition(make, cost):
    measure, projections = weighted(13, 3), make(5, 3)
    energy = energy_infinity(measure, projections, eps=0.7, cost=cost)
    assert_close(
        energy, definition(measure, projections, 0.7, cost), atol=1e-11, rtol=1e-11
    )  # its error is quadratic in the residual


def test_the_gradient_is_that_of_the_definition():
    """The gradient at fixed potentials, and implicit differentiation of the limit."""
    measure, projections = weighted(13, 3), tied(5, 3)
    points = measure.points.clone().requires_grad_()
    (grad,) = torch.autograd.grad(definition(measure.moved(points), projections, 0.7, "dot"), points)
    held = gradient(energy_infinity, measure, projections, eps=0.7) * measure.weights[:, None]
    assert_close(held, grad, atol=1e-8, rtol=0)  # the implicit gradient solves a system, to its own tolerance


def test_the_recentred_map_is_the_gradient_of_the_l2_energy():
    measure, projections = weighted(13, 3), tied(5, 3)
    field = AttentionMap(projections, eps=0.4, recentred=True)(measure)
    found = gradient(energy_infinity, measure, projections, eps=0.4, cost="l2")
    assert_close(found, -field(measure.points), atol=LIMIT, rtol=0)


def test_two_particles_have_a_closed_form():
    """At ±a: the coupling of two points is fixed by one number, and F^∞ = ½ log cosh(a²/ε)."""
    one = torch.eye(1, dtype=torch.float64)
    for a, eps in ((0.7, 1.0), (1.3, 0.2)):
        measure = Measure.uniform(torch.tensor([[-a], [a]], dtype=torch.float64))
        energy = energy_infinity(measure, Projections.tied(one), eps=eps)
        assert energy.item() == pytest.approx(0.5 * math.log(math.cosh(a * a / eps)), rel=CLOSE)


def test_softmax_is_a_gradient_in_the_query_alone():
    """T¹ = −∇_x log ∫ k⁰(x, ·) dμ for a fixed measure."""
    measure, projections = weighted(13, 3), tied(5, 3)
    x = normal(7, 3, seed=8).requires_grad_()
    scores = x @ projections.interaction @ measure.points.T / 0.7
    (grad,) = torch.autograd.grad((scores + measure.weights.log()).logsumexp(1).sum(), x)
    field = AttentionMap(projections, eps=0.7, n_iters=1)(measure)
    assert_close(field(x.detach()), -grad, atol=1e-11, rtol=0)  # rounding, divided by ε


def test_the_energy_of_a_point_mass_is_the_lowest():
    projections = tied(3, 2)
    assert energy_infinity(Measure.uniform(torch.zeros(5, 2).double()), projections).item() == pytest.approx(
        0, abs=1e-15
    )
    for seed in range(5):
        assert energy_infinity(weighted(7, 2, seed=seed), projections) > 0.01
