"""T⁰, T^l and T^∞ compared with `sinkhorn`; weights, coinciding particles and blocks."""

import math
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_limit
from sinkformers.flows import AttentionMap, Measure, Projections
from tests.flows_problems import general, indefinite, normal, tied, weighted

COUNTS = [0, 1, 2, 3, 4, 7, math.inf]
EXACT = 1e-12  # float64: a few steps on 13 particles, 4e3 roundings
LIMIT = 1e-9  # the residual of 1e-11, times 1/ε, points and matrices of up to 10 in all, and a margin of 10


def raw_scores(projections, x, y, eps, cost):
    queries, keys = x @ projections.query.T, y @ projections.key.T
    if cost == "dot":
        return queries @ keys.T / eps
    return -(queries[:, None] - keys).square().sum(-1) / (2 * eps)


@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
def test_finite_counts_are_the_operators(n_iters, cost):
    measure, projections = weighted(13, 3), general(5, 3)
    scores = raw_scores(projections, measure.points, measure.points, 0.7, cost)
    weights = sinkhorn(scores, n_iters=n_iters, row_mass=measure.weights, col_mass=measure.weights)
    attention = AttentionMap(projections, eps=0.7, cost=cost, n_iters=n_iters)
    expected = weights @ measure.points @ projections.value.T / 0.7
    assert_close(attention(measure)(measure.points), expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("cost", ["dot", "l2"])
def test_without_normalisation_it_is_an_integral(cost):
    measure, projections = weighted(13, 3), general(5, 3)
    kernel = raw_scores(projections, measure.points, measure.points, 0.7, cost).exp()
    expected = (kernel * measure.weights) @ measure.points @ projections.value.T / 0.7
    field = AttentionMap(projections, eps=0.7, cost=cost, n_iters=0)(measure)
    assert_close(field(measure.points), expected, atol=EXACT / 10, rtol=EXACT / 10)


@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("make", [general, tied, lambda _k, d: indefinite(d)])
def test_the_limit_is_the_operators(make, cost):
    """The averaged update and alternating both, against the core's limit."""
    measure, projections = weighted(13, 3), make(5, 3)
    scores = raw_scores(projections, measure.points, measure.points, 0.7, "dot")
    limits = {"row_mass": measure.weights, "col_mass": measure.weights, "tol": 1e-13, "max_iters": 100_001}
    weights = sinkhorn_limit(scores, **limits)
    field = AttentionMap(projections, eps=0.7, cost=cost)(measure)
    assert field.evidence.converged
    assert field.evidence.residual <= 1e-11
    expected = weights @ measure.points @ projections.value.T / 0.7
    assert_close(field(measure.points), expected, atol=LIMIT, rtol=0)


def test_the_averaged_update_takes_no_more_steps_as_eps_falls():
    """Each step at least halves the error: 37 steps from 1 to 1e-11 for any ε. Alternating needs hundreds."""
    points = torch.linspace(-1, 1, 101, dtype=torch.float64)[:, None]
    measure, projections = Measure.uniform(points), Projections.tied(torch.eye(1, dtype=torch.float64))
    for eps in (0.1, 0.01, 0.003):
        evidence = AttentionMap(projections, eps=eps)(measure).evidence
        assert evidence.converged
        assert evidence.iterations <= 40


@pytest.mark.parametrize("max_bytes", [2**30, 13 * 13 * 8])
def test_too_few_iterations_are_reported(max_bytes):
    """By Newton's method and by alternating, which both start with alternating steps."""
    measure = weighted(13, 3)
    evidence = AttentionMap(general(5, 3), eps=0.05, max_iters=3, max_bytes=max_bytes)(measure).evidence
    assert evidence.iterations == 3
    assert not evidence.converged
    assert evidence.residual > 1e-3


def test_newton_and_alternating_have_the_same_limit():
    """Six matrices of 13 × 13 do not fit into the bytes of one, so these alternate."""
    measure, projections = weighted(13, 3), general(5, 3)
    newton, blocks = (
        AttentionMap(projections, eps=0.7, max_bytes=size, max_iters=10_001)(measure) for size in (2**30, 13 * 13 * 8)
    )
    assert newton.evidence.converged
    assert blocks.evidence.converged
    assert newton.evidence.iterations < blocks.evidence.iterations
    assert_close(newton(measure.points), blocks(measure.points), atol=LIMIT, rtol=0)


def test_sharp_scores_converge_without_symmetry():
    """Alternating steps leave an error of 1e-3 or more here after 1001 of them."""
    measure = weighted(13, 3)
    evidence = AttentionMap(general(5, 3), eps=0.02)(measure).evidence
    assert evidence.converged
    assert AttentionMap(general(5, 3), eps=0.02, max_bytes=13 * 13 * 8)(measure).evidence.residual > 1e-3


@pytest.mark.parametrize("n_iters", COUNTS)
@pytest.mark.parametrize("make", [general, tied])
def test_coinciding_particles_are_one_heavier_particle(make, n_iters):
    points, projections = normal(7, 2), make(3, 2)
    weights = torch.tensor([1.0, 2, 3, 4, 5, 6, 8], dtype=torch.float64) / 29
    split = Measure(torch.cat([points, points[:1]]), torch.cat([weights[:1] * 0.25, weights[1:], weights[:1] * 0.75]))
    attention = AttentionMap(projections, n_iters=n_iters)
    whole, apart = attention(Measure(points, weights)), attention(split)
    somewhere = normal(5, 2, seed=9)
    assert_close(apart(somewhere), whole(somewhere), atol=LIMIT / 10, rtol=LIMIT / 10)


@pytest.mark.parametrize("n_iters", COUNTS)
def test_a_particle_of_weight_zero_has_no_effect(n_iters):
    points, projections = normal(7, 2), general(3, 2)
    weights = torch.tensor([1.0, 2, 0, 4, 5, 0, 8], dtype=torch.float64) / 20
    kept = weights > 0
    attention = AttentionMap(projections, n_iters=n_iters)
    with_zeros = attention(Measure(points, weights))(points)
    without = attention(Measure(points[kept], weights[kept]))(points)
    assert_close(with_zeros, without, atol=EXACT / 10, rtol=EXACT / 10)


def test_a_particle_of_weight_zero_may_be_anywhere():
    """It is so far away that exp(scores) is zero for all particles with weight."""
    points = torch.tensor([[0.0], [1.0], [1e4]], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    field = AttentionMap(Projections.tied(torch.eye(1, dtype=torch.float64)))(Measure(points, weights))
    assert field.evidence.converged
    assert_close(field(points)[2], torch.tensor([-1.0], dtype=torch.float64))  # it attends to the nearer one only


@pytest.mark.parametrize("n_iters", COUNTS)
@pytest.mark.parametrize("make", [general, tied])
def test_blocks_of_rows_change_nothing(make, n_iters):
    measure, projections = weighted(13, 3), make(5, 3)
    whole = AttentionMap(projections, n_iters=n_iters)(measure)
    blocked = AttentionMap(projections, n_iters=n_iters, max_bytes=4 * 13 * 8)(measure)
    assert_close(blocked(measure.points), whole(measure.points), atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("n_iters", [1, 2, 3, math.inf])
def test_a_field_can_be_evaluated_at_other_points(n_iters):
    """A particle of tiny weight moves with the field, and hardly changes it."""
    measure, projections, place = weighted(11, 2), tied(3, 2), normal(1, 2, seed=5)
    attention = AttentionMap(projections, n_iters=n_iters)
    light = 1e-9
    joined = Measure(
        torch.cat([measure.points, place]),
        torch.cat([measure.weights * (1 - light), measure.weights.new_tensor([light])]),
    )
    assert_close(
        attention(measure)(place), attention(joined)(place), atol=100 * light, rtol=0
    )  # of first order in the added weight


def test_recentred_maps_subtract_what_they_say():
    measure, projections = weighted(13, 3), general(3, 3)
    x = measure.points
    raw, recentred = (AttentionMap(projections, eps=0.5, cost="l2", recentred=r)(measure)(x) for r in (False, True))
    assert_close(recentred, raw - x @ projections.value.T / 0.5, atol=LIMIT / 10, rtol=0)
    raw, recentred = (
        AttentionMap(projections, eps=0.5, cost="l2", n_iters=1, recentred=r)(measure)(x) for r in (False, True)
    )
    moved = torch.linalg.solve(projections.key, projections.query @ x.T).T
    assert_close(recentred, raw - moved @ projections.value.T / 0.5, atol=LIMIT / 10, rtol=0)


def test_sinkhorns_map_ignores_terms_of_one_point_and_softmax_those_of_the_query():
    """Proposition 1: "dot" and "l2" differ by such terms."""
    measure, projections = weighted(13, 3), general(5, 3)
    dot, l2 = (AttentionMap(projections, cost=cost)(measure)(measure.points) for cost in ("dot", "l2"))
    assert_close(dot, l2, atol=LIMIT, rtol=0)
    dot, l2 = (AttentionMap(projections, cost=cost, n_iters=1)(measure)(measure.points) for cost in ("dot", "l2"))
    assert (dot - l2).abs().max() > 0.1


def test_doubly_stochastic_weights_keep_the_mean():
    """∫ T^∞ dμ = (1/ε) W_V ∫ x dμ, since every column sums to its mass; for SoftMax this does not hold."""
    measure, projections = weighted(13, 3), general(5, 3)
    expected = projections.value @ measure.mean() / 0.5
    total = measure.integrate(AttentionMap(projections, eps=0.5)(measure)(measure.points))
    assert_close(total, expected, atol=LIMIT, rtol=0)
    softmax = measure.integrate(AttentionMap(projections, eps=0.5, n_iters=1)(measure)(measure.points))
    assert (softmax - expected).abs().max() > 0.05


def test_float32_converges_to_its_own_precision():
    measure = Measure.uniform(normal(13, 3).float())
    projections = Projections.tied((normal(5, 3) / 2).float())
    field = AttentionMap(projections)(measure)
    assert field.evidence.converged
    exact = AttentionMap(Projections.tied(projections.query.double()))(Measure.uniform(measure.points.double()))
    assert_close(
        field(measure.points).double(), exact(measure.points.double()), atol=1e-5, rtol=0
    )  # 84 roundings of float32, on values of order 1


@pytest.mark.parametrize("make", [general, tied])
def test_nearly_a_point_mass_and_one_particle(make):
    projections, place = make(3, 2), normal(1, 2)
    for n_iters in (1, 2, 3, math.inf):
        field = AttentionMap(projections, eps=0.5, n_iters=n_iters)(Measure.uniform(place))
        assert_close(field(place), place @ projections.value.T / 0.5)


def test_a_large_measure_does_not_store_its_matrix():
    """The matrix of 6,000 particles would take 288 MB; blocks of rows, and loaded libraries, take at most half."""
    code = """
import resource, torch
from sinkformers.flows import AttentionMap, Measure, Projections
points = torch.randn(6000, 1, dtype=torch.float64)
attention = AttentionMap(Projections.tied(torch.eye(1, dtype=torch.float64)), n_iters=3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention(Measure.uniform(points))(points)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 144_000  # KiB
