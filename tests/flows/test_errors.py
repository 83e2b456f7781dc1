"""Wrong arguments raise errors that state what is wrong, why, and what to do."""

import math

import pytest
import torch

from sinkformers.flows import (
    EULER,
    AttentionMap,
    Bump,
    Gaussian,
    Grid,
    Measure,
    Projections,
    ScoreVelocity,
    energy_zero,
    energy_zero_of_gaussian,
    first_order_limit,
    flow,
    heat,
    integrate,
    paper_sinkformer_limit,
    paper_transformer_limit,
    score_flow,
    sinkformer_limit,
    sinkhorn_of_gaussian,
    softmax_of_gaussian,
    transformer_limit,
)
from tests.flows_problems import general, normal, tied, weighted

EYE = torch.eye(2, dtype=torch.float64)
SINGULAR = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
SADDLE = torch.diag(torch.tensor([1.0, -0.5], dtype=torch.float64))
TWISTED = torch.tensor([[1.0, 0.5], [-0.5, 1.0]], dtype=torch.float64)
GRID = Grid(reach=2.0, cells=5)
EVEN = torch.full((5,), 0.25, dtype=torch.float64)
STEEP = torch.full((3, 2), 30.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Measure.uniform(normal(3)), ValueError, r"points must have shape \(n, d\), n ≥ 1, d ≥ 1; got \(3,\)"),
        (lambda: Measure.uniform(torch.ones(3, 2).long()), TypeError, "float32 or float64; got torch.int64"),
        (
            lambda: Measure.uniform(torch.tensor([[0.0], [math.inf], [math.nan]])),
            ValueError,
            r"points must be finite, but particle 1 is at \[inf\] \(2 of 3 are not finite\)",
        ),
        (lambda: Measure(normal(3, 1), torch.ones(2).double() / 2), ValueError, r"weights must have shape \(3,\)"),
        (
            lambda: Measure(normal(2, 1), torch.tensor([1.5, -0.5]).double()),
            ValueError,
            "weights must be non-negative; the smallest is -0.5",
        ),
        (
            lambda: Measure(normal(2, 1), torch.tensor([0.5, 0.6]).double()),
            ValueError,
            r"weights must sum to 1; their sum is 1.1. Divide them by weights.sum\(\)",
        ),
        (
            lambda: Projections(EYE, EYE, normal(3, 3)),
            ValueError,
            r"value must be a matrix of shape \(2, 2\); got \(3, 3\)",
        ),
        (
            lambda: Projections(EYE, normal(3, 2), EYE),
            ValueError,
            r"key must be a matrix of shape \(2, 2\); got \(3, 2\)",
        ),
        (lambda: Projections(EYE / 0, EYE, EYE), ValueError, "query must be finite; it has 4 other entries"),
        (lambda: AttentionMap(tied(2, 2), eps=0.0), ValueError, "eps must be a positive number; got 0.0"),
        (lambda: AttentionMap(tied(2, 2), eps=-1.0), ValueError, "eps must be a positive number; got -1.0"),
        (lambda: AttentionMap(tied(2, 2), cost="L2"), ValueError, "cost must be one of 'dot', 'l2'; got 'L2'"),
        (
            lambda: AttentionMap(tied(2, 2), n_iters=2.5),
            ValueError,
            r"n_iters must be a whole number ≥ 0 .* or math.inf",
        ),
        (lambda: AttentionMap(tied(2, 2), n_iters=-1), ValueError, "got -1"),
        (lambda: AttentionMap(tied(2, 2), n_iters=0, recentred=True), ValueError, "T⁰ has no recentred map"),
        (
            lambda: AttentionMap(tied(2, 2), n_iters=1, recentred=True),
            ValueError,
            "recentred T¹ needs cost=\"l2\"; got 'dot'",
        ),
        (
            lambda: AttentionMap(Projections.tied(EYE, SINGULAR), n_iters=1, cost="l2", recentred=True),
            ValueError,
            "W_K must be invertible, but its lowest singular value is 0",
        ),
        (
            lambda: AttentionMap(general(3, 2), n_iters=1, cost="l2", recentred=True),
            ValueError,
            r"W_K must be square and invertible; got shape \(3, 2\)",
        ),
        (
            lambda: AttentionMap(tied(2, 2))(weighted(5, 3)),
            ValueError,
            "act on 2 coordinates in torch.float64; the measure has 3",
        ),
        (
            lambda: AttentionMap(tied(2, 2))(Measure.uniform(normal(5, 2).requires_grad_())),
            ValueError,
            r"points of a measure get no gradient.*points.detach\(\)",
        ),
        (
            lambda: AttentionMap(tied(2, 2))(Measure.uniform(torch.tensor([[0, 1], [1e200, 0]], dtype=torch.float64))),
            OverflowError,
            r"scores overflow; particle 1 is at \[1e\+200, 0.0\]. The particles diverge",
        ),
        (
            lambda: AttentionMap(Projections.tied(EYE), n_iters=0)(Measure.uniform(STEEP))(STEEP),
            OverflowError,
            r"exp\(scores\) overflows; the largest score is .* T⁰ does not normalise",
        ),
        (
            lambda: energy_zero(Measure.uniform(STEEP), Projections.tied(EYE)),
            OverflowError,
            "energy_zero: exp.scores. overflows",
        ),
        (
            lambda: sinkformer_limit(Projections.tied(EYE, TWISTED)),
            ValueError,
            "W_QᵀW_K must be symmetric; it differs .* by up to 1",
        ),
        (
            lambda: sinkformer_limit(Projections.tied(SINGULAR)),
            ValueError,
            "must be positive definite, but it is singular",
        ),
        (
            lambda: sinkformer_limit(Projections.tied(EYE, SADDLE)),
            ValueError,
            "indefinite or negative: its lowest eigenvalue is -0.5",
        ),
        (
            lambda: paper_sinkformer_limit(Projections.tied(SINGULAR)),
            ValueError,
            "paper_sinkformer_limit: W_QᵀW_K must be positive",
        ),
        (lambda: transformer_limit(Projections.tied(EYE, SINGULAR)), ValueError, "W_K must be invertible"),
        (lambda: paper_transformer_limit(Projections.tied(EYE, SINGULAR)), ValueError, "W_K must be invertible"),
        (
            lambda: first_order_limit(Projections.tied(EYE, SINGULAR), softmax=True),
            ValueError,
            "W_K must be invertible",
        ),
        (lambda: Gaussian.centred(SADDLE), ValueError, "covariance must be positive definite"),
        (lambda: Gaussian.centred(TWISTED), ValueError, "covariance must be symmetric"),
        (lambda: Bump(0), ValueError, "power and dim must be whole numbers ≥ 1; got 0 and 1"),
        (lambda: Bump().quadrature(0), ValueError, "per_axis must be a whole number ≥ 1; got 0"),
        (
            lambda: sinkhorn_of_gaussian(Gaussian.centred(EYE), tied(2, 2), eps=0),
            ValueError,
            "eps must be a positive number",
        ),
        (
            lambda: sinkhorn_of_gaussian(Gaussian.centred(EYE), Projections.tied(EYE, SADDLE), recentred=True),
            ValueError,
            "W_QᵀW_K must be positive definite",
        ),
        (
            lambda: softmax_of_gaussian(Gaussian.centred(EYE), tied(2, 2), cost="dot", recentred=True),
            ValueError,
            'recentred map needs cost="l2"',
        ),
        (lambda: energy_zero_of_gaussian(Gaussian(normal(2), EYE), tied(2, 2)), ValueError, "mean must be zero"),
        (lambda: integrate(torch.neg, EYE, (0.0,)), ValueError, r"times must increase.* got \(0.0,\)"),
        (lambda: integrate(torch.neg, EYE, (0.0, 0.0)), ValueError, "times must increase"),
        (lambda: integrate(torch.neg, EYE, (0.0, 1.0), h=-1), ValueError, "h must be a positive number; got -1"),
        (
            lambda: integrate(torch.neg, EYE, (0.0, 1.0), method=EULER),
            ValueError,
            "Euler has no error estimate, so h must be given",
        ),
        (lambda: integrate(torch.neg, EYE, (0.0, 1.0), atol=0), ValueError, "atol > 0; got 1e-08 and 0"),
        (lambda: integrate(torch.neg, EYE, (0.0, 1.0), max_steps=2, rtol=1e-13), ValueError, "2 steps reach only t ="),
        (
            lambda: integrate(torch.square, EYE, (0.0, 12.0), method=EULER, h=1.0),
            OverflowError,
            r"particle 0 is no longer finite \(2 of 2",
        ),
        (lambda: integrate(torch.square, EYE, (0.0, 2.0)), ValueError, "at t = 1 no step is short enough"),
        (lambda: Grid(reach=-1, cells=5), ValueError, "reach must be a positive number"),
        (lambda: Grid(reach=1, cells=5, dim=3), ValueError, "dim must be 1 or 2 and cells ≥ 3; got dim 3"),
        (lambda: heat(GRID, EVEN[:4], (0.0, 1.0), coefficient=1.0), ValueError, r"grid's shape \(5,\); got \(4,\)"),
        (lambda: heat(GRID, 2 * EVEN, (0.0, 1.0), coefficient=1.0), ValueError, "mass 1 on its grid; got 2"),
        (lambda: heat(GRID, EVEN, (0.0, 1.0), coefficient=-1.0), ValueError, "coefficient must be a positive number"),
        (
            lambda: score_flow(
                GRID, GRID.density(Bump()), (0.0, 1.0), velocity=ScoreVelocity(-EYE[:1, :1], EYE[:1, :1])
            ),
            ValueError,
            "density must be positive.*its smallest value is 0",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_particles_that_diverge_are_named():
    """W_V of the sign of W_QᵀW_K: the raw flow expands exponentially until the scores overflow, or the map.

    Which of them is first depends on how the processor rounds.
    """
    diverging = Projections(EYE, EYE, 50 * EYE)
    overflow = r"(scores overflow; particle \d is at|the map overflows; the norm of the farthest point is) .* diverge"
    with pytest.raises(OverflowError, match=overflow):
        flow(AttentionMap(diverging), Measure.uniform(normal(5, 2)), (0.0, 200.0), method=EULER, h=1.0)


def test_an_overflow_of_the_map_is_not_blamed_on_missing_normalisation():
    """The scores are still finite when the map overflows."""
    diverging = AttentionMap(Projections(EYE, EYE, EYE), eps=0.01)
    with pytest.raises(OverflowError, match=r"Field: the map overflows; the norm of the farthest point is .* diverge"):
        flow(diverging, Measure.uniform(normal(5, 2)), (0.0, 100.0), method=EULER, h=1.0)
