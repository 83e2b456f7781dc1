"""Orders of convergence to exact solutions, and the evidence of a flow."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn
from sinkformers.flows import (
    BOGACKI_SHAMPINE,
    DORMAND_PRINCE,
    EULER,
    HEUN,
    RK4,
    AttentionMap,
    Measure,
    Projections,
    energy_infinity,
    flow,
    integrate,
)
from sinkformers.flows.integrators import METHODS, step
from tests.flows_problems import order, tied, weighted

START = torch.tensor([0.3, 1.1], dtype=torch.float64)


def logistic(x):
    return x * (2 - x)


def exact(t):
    return 2 / (1 + (2 / START - 1) * math.exp(-2 * t))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_error_falls_with_the_methods_order(method):
    counts = (8, 16, 32)
    errors = [
        (integrate(logistic, START, (0.0, 1.0), method=method, h=1 / n).states[-1] - exact(1)).abs().max().item()
        for n in counts
    ]
    assert order(counts, errors) == pytest.approx(-method.order, abs=0.35)  # at 8 steps the next order still counts


@pytest.mark.parametrize("method", [BOGACKI_SHAMPINE, DORMAND_PRINCE], ids=lambda method: method.name)
def test_the_embedded_method_has_its_order_too(method):
    """The estimate is the error of the less accurate method: order + 1 in one step."""
    lengths = (0.2, 0.1, 0.05)
    gaps = [step(logistic, START, h, method)[1].abs().max().item() for h in lengths]
    assert order(lengths, gaps) == pytest.approx(
        method.embedded_order + 1, abs=0.25
    )  # at h = 0.2 the next order still counts


@pytest.mark.parametrize("method", [BOGACKI_SHAMPINE, DORMAND_PRINCE], ids=lambda method: method.name)
@pytest.mark.parametrize("tol", [1e-4, 1e-7, 1e-10])
def test_the_chosen_steps_keep_the_tolerance(method, tol):
    times = (0.0, 0.3, 1.7, 2.0)
    path = integrate(logistic, START, times, method=method, rtol=tol, atol=tol)
    assert path.times == times
    for t, state in zip(times, path.states, strict=True):
        assert (state - exact(t)).abs().max() < 20 * tol  # errors of some ten steps add up
    assert path.evaluations == (path.accepted + path.rejected) * len(method.stages) + 1


def test_a_step_too_long_is_rejected():
    """A velocity that changes suddenly: after a smooth part, long steps have to be repeated."""

    def sudden(x):
        return torch.stack([torch.ones_like(x[0]), 50 * torch.exp(-(((x[0] - 0.7) / 0.1) ** 2))])

    path = integrate(sudden, torch.zeros(2, dtype=torch.float64), (0.0, 4.0), rtol=1e-8, atol=1e-8)
    assert path.rejected > 0
    assert path.states[-1, 1].item() == pytest.approx(
        50 * 0.1 * math.pi**0.5, abs=1e-5
    )  # a thousand times the tolerance, on a value of 9


def test_progress_is_called_with_every_accepted_time():
    seen = []
    path = integrate(logistic, START, (0.0, 0.5, 1.0), method=HEUN, h=0.1, progress=seen.append)
    assert len(seen) == path.accepted == 10
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert path.rejected == 0


@pytest.mark.parametrize("n_iters", [1, 3])
def test_eulers_method_is_the_residual_network(n_iters):
    """Layers x ← x + softmax(xᵀW_QᵀW_K x) W_V x, one after the other."""
    projections = tied(5, 3)
    start = Measure.uniform(weighted(11, 3).points)
    x = start.points
    for _ in range(4):
        weights = sinkhorn(x @ projections.interaction @ x.T, n_iters=n_iters)
        x = x + weights @ x @ projections.value.T
    path = flow(AttentionMap(projections, n_iters=n_iters), start, (0.0, 4.0), method=EULER, h=1.0)
    assert_close(path.states[-1], x, atol=1e-12, rtol=0)  # four layers in float64
    assert path.accepted == path.evaluations == 4


def test_energies_fall_at_the_rate_of_the_squared_velocity():
    """F(0) − F(t) = ∫∫|T|²dμ dt, by Simpson's rule on states that RK4 reached with the same steps."""
    measure, projections = weighted(13, 2), tied(3, 2)
    attention = AttentionMap(projections)
    times = torch.linspace(0, 1, 41).tolist()
    path = flow(attention, measure, times, method=RK4, h=1.0, energy=lambda now: energy_infinity(now, projections))
    assert all(b < a for a, b in zip(path.energies, path.energies[1:], strict=False))
    rates = torch.tensor([path[k].norm(attention(path[k])(path.states[k])) ** 2 for k in range(len(path))])
    rates, simpson = rates.double(), torch.ones(41, dtype=torch.float64)
    simpson[1:-1:2], simpson[2:-1:2] = 4, 2
    spent = float(simpson @ rates) / 120
    assert path.energies[0] - path.energies[-1] == pytest.approx(
        spent, rel=1e-6
    )  # Simpson's error is of order h⁴ = 4e-7


def test_a_trajectory_has_the_evidence_of_its_limits():
    measure, projections = weighted(7, 2), tied(3, 2)
    path = flow(AttentionMap(projections), measure, (0.0, 0.1))
    assert path.converged
    assert 0 < path.residual <= 1e-11
    assert path.energies == ()
    assert_close(path[0].points, measure.points)
    assert_close(path[-1].weights, measure.weights)
    late = flow(AttentionMap(projections, max_iters=2), measure, (0.0, 1e-3), method=EULER, h=1e-3)
    assert not late.converged


def test_one_particle_falls_exponentially():
    """T(x) = W_V x for a point mass."""
    start = Measure.uniform(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    path = flow(AttentionMap(Projections.tied(torch.eye(2).double())), start, (0.0, 1.0), rtol=1e-10, atol=1e-10)
    assert_close(path.states[-1], start.points / math.e, atol=1e-9, rtol=0)  # ten times the tolerance
