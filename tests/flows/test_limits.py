"""Theorem 1 and Proposition 4 with their constants, by quadrature and in closed form; each fails with the paper's."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers.flows import (
    AttentionMap,
    Bump,
    Gaussian,
    Measure,
    Projections,
    first_order_limit,
    paper_sinkformer_limit,
    paper_transformer_limit,
    sinkformer_limit,
    sinkhorn_of_gaussian,
    softmax_of_gaussian,
    transformer_limit,
)
from tests.flows_problems import normal, order, tied

ONE = torch.eye(1, dtype=torch.float64)
W_KEY = torch.tensor([[1.0, 0.8], [-0.3, 0.9]], dtype=torch.float64)  # not symmetric
W_QUERY = torch.tensor([[0.9, 0.1], [0.2, 1.1]], dtype=torch.float64)


def slope(measure, values, against):
    """The constant c of the best `values ≈ c · against` in L²(μ)."""
    return float(measure.integrate((values * against).sum(-1)) / measure.integrate(against.square().sum(-1)))


def inside(measure, radius):
    """The particles within a box, with what weight they have."""
    kept = measure.points.abs().amax(-1) <= radius
    return Measure(measure.points[kept], measure.weights[kept] / measure.weights[kept].sum())


@pytest.mark.parametrize(("dim", "per_axis", "widths"), [(1, 301, (0.008, 0.004, 0.002)), (2, 41, (0.04, 0.02, 0.01))])
def test_the_constant_of_theorem_1_is_one_half(dim, per_axis, widths):
    """Error O(ε) inside the support; the straight line through the last two ε leaves O(ε²)."""
    density = Bump(4, dim)
    measure, projections = density.quadrature(per_axis), Projections.tied(torch.eye(dim, dtype=torch.float64))
    part = inside(measure, 0.5)
    constants = [
        slope(
            part, AttentionMap(projections, eps=eps, recentred=True)(measure)(part.points), -density.score(part.points)
        )
        for eps in widths
    ]
    gaps = [abs(constant - 0.5) for constant in constants]
    assert order(widths, gaps) == pytest.approx(1, abs=0.15)  # the next order in ε bends the slope
    extrapolated = 2 * constants[-1] - constants[-2]
    assert extrapolated == pytest.approx(0.5, abs=0.005)
    assert abs(extrapolated - 1) > 0.49  # the paper's


@pytest.mark.parametrize("d", [1, 2, 10])
def test_theorem_1_for_gaussians_with_any_value_matrix(d):
    spread, query = normal(d, d), torch.eye(d).double() + normal(d, d, seed=1) / (4 * d)
    density = Gaussian.centred(spread @ spread.T / d + torch.eye(d).double() / 2)
    projections = Projections(query, query, normal(d, d, seed=2))
    limit, paper = (
        make(projections)(torch.eye(d).double(), density.score) for make in (sinkformer_limit, paper_sinkformer_limit)
    )
    widths = (1e-3, 1e-4, 1e-5)
    errors = [
        (sinkhorn_of_gaussian(density, projections, eps=eps, recentred=True)(torch.eye(d).double()) - limit)
        .norm()
        .item()
        for eps in widths
    ]
    assert order(widths, errors) == pytest.approx(1, abs=0.05)
    assert errors[-1] < 1e-3 * limit.norm()
    assert_close(paper, 2 * limit)


def test_proposition_4_has_the_transposed_inverse():
    """Closed form at ε = 1e-6, a W_K that is not symmetric: the limit to 1e-4, the paper's vector far from it."""
    density = Gaussian(torch.tensor([0.2, -0.5]).double(), torch.tensor([[0.6, 0.2], [0.2, 0.3]]).double())
    projections, place = Projections.tied(W_QUERY, W_KEY), torch.tensor([[0.7, -1.1]]).double()
    measured = softmax_of_gaussian(density, projections, eps=1e-6, recentred=True)(place)
    limit, paper = (make(projections)(place, density.score) for make in (transformer_limit, paper_transformer_limit))
    assert (measured - limit).norm() < 1e-4 * limit.norm()
    assert (measured - paper).norm() > 0.1 * limit.norm()


def test_proposition_4_by_quadrature():
    """SoftMax itself on a grid, no closed form; the error falls as ε."""
    density, projections = Bump(4, 2), Projections.tied(W_QUERY, W_KEY)
    place = torch.tensor([[0.25, -0.1]]).double()
    limit, paper = (make(projections)(place, density.score) for make in (transformer_limit, paper_transformer_limit))
    measure, widths = density.quadrature(81), (0.02, 0.01, 0.005)
    errors = [
        (AttentionMap(projections, eps=eps, cost="l2", n_iters=1, recentred=True)(measure)(place) - limit).norm().item()
        for eps in widths
    ]
    assert order(widths, errors) == pytest.approx(1, abs=0.2)
    assert (paper - limit).norm() > 5 * errors[-1]


def test_the_transformer_limit_is_a_gradient_in_x():
    """−∇_x log ρ(W_K⁻¹W_Q x), by autograd."""
    density, projections = (
        Gaussian.centred(torch.tensor([[0.6, 0.2], [0.2, 0.3]]).double()),
        Projections.tied(W_QUERY, W_KEY),
    )
    x = normal(5, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(density.log(x @ torch.linalg.solve(W_KEY, W_QUERY).T).sum(), x)
    assert_close(transformer_limit(projections)(x.detach(), density.score), -gradient, atol=1e-12, rtol=0)  # rounding


def test_the_two_versions_agree_where_the_key_matrix_is_symmetric():
    projections = Projections.tied(W_QUERY, W_KEY @ W_KEY.T)
    assert_close(transformer_limit(projections).mobility, paper_transformer_limit(projections).mobility)


def test_first_order_limits():
    density, projections, place = (
        Gaussian.centred(torch.eye(2).double()),
        Projections.tied(W_QUERY, W_KEY),
        normal(3, 2),
    )
    # The error is of order ε = 1e-7.
    scaled = 1e-7 * softmax_of_gaussian(density, projections, eps=1e-7)(place)
    assert_close(scaled, -place @ (W_QUERY.T @ W_QUERY).T, atol=1e-6, rtol=0)
    assert_close(scaled, place @ first_order_limit(projections, softmax=True).T, atol=1e-6, rtol=0)
    symmetric = tied(2, 2)
    scaled = 1e-7 * sinkhorn_of_gaussian(density, symmetric, eps=1e-7)(place)
    assert_close(scaled, place @ first_order_limit(symmetric, softmax=False).T, atol=1e-6, rtol=0)


def test_theorem_1_fails_where_the_matrix_is_singular():
    """W_QᵀW_K = diag(1, 0), W_V = −1: along the second axis T̄ = x/ε, which has no limit. Hence positive definite."""
    flat = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    projections = Projections(flat, flat, -torch.eye(2, dtype=torch.float64))
    measure = Bump(4, 2).quadrature(31)
    for eps in (0.04, 0.01):
        field = AttentionMap(projections, eps=eps, recentred=True)(measure)
        assert field(torch.tensor([[0.2, 0.3]], dtype=torch.float64))[0, 1].item() == pytest.approx(
            0.3 / eps, rel=1e-9
        )  # a hundred times the tolerance of the limit
