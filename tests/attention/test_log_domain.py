"""Heads whose scalings leave the floating-point range: the log domain takes them, and nothing shows."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from sinkformers.core import log_domain
from tests import oracle

BACKENDS = ["torch", "native"]


def hub(n, depth):
    """Everybody looks at half of the keys and the first query at all: its scaling has to make up for the depth."""
    scores = torch.full((n, n), -float(depth))
    scores[0], scores[:, : n // 2] = 0, 0
    return scores + 0.3 * torch.randn(n, n)


def noisy_tokens(n):
    """Of three heads the middle one is the hub, by its bias; the others are gentle and must not be disturbed."""
    return [0.3 * torch.randn(3, n, 5, requires_grad=True) for _ in range(2)] + [torch.randn(3, n, 7)]


@pytest.fixture
def recomputed(monkeypatch):
    """The number of heads in each run of the log domain."""
    calls, original = [], log_domain.potentials
    monkeypatch.setattr(log_domain, "potentials", lambda p, *a: calls.append(len(p.scores)) or original(p, *a))
    return calls


def compare(got, exact, inputs, doubles, bias, n_iters):
    """Output and gradients within the operator's own tolerance, per unit of what its weights are multiplied with."""
    value, d_out = inputs[2].detach(), torch.randn(got.shape)
    scores = (inputs[0] @ inputs[1].mT / 5**0.5 + bias).detach()
    tolerance, grad_tolerance = oracle.tolerances(scores, n_iters, d_out @ value.mT)
    assert_close(got.double(), exact, atol=tolerance * value.abs().sum(-2).max().item(), rtol=0)
    grads = torch.autograd.grad(got, inputs, d_out)
    exact_grads = torch.autograd.grad(exact, doubles, d_out.double())
    for place, (a, b) in enumerate(zip(grads, exact_grads, strict=True)):
        of_value = tolerance * d_out.abs().sum(-2).max().item()  # it sums weights alone
        assert_close(a.double(), b, atol=of_value if place == 2 else grad_tolerance, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("depth", "n_iters", "tau"), [(1000, 51, 1.0), (88, 43, 1.0), (88, 51, 0.99)])
def test_the_hub_by_bias(depth, n_iters, tau, backend, recomputed):
    n = 64
    q, k, v = noisy_tokens(n)
    bias = torch.stack([torch.zeros(n, n), hub(n, depth), torch.zeros(n, n)])
    inputs = [x.detach().requires_grad_() for x in (q, k, v, bias, torch.full((3,), tau))]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    got = sinkhorn_attention(*inputs[:4], n_iters=n_iters, tau=inputs[4], backend=backend)
    exact = oracle.attention(*doubles[:3], n_iters, doubles[4], bias=doubles[3])
    compare(got, exact, inputs, doubles, bias, n_iters)
    assert set(recomputed) == {1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_implicit_gradient_of_the_hub(backend, recomputed):
    """Relaxed columns converge, so that the implicit gradient is that of the steps, tau's included."""
    n, n_iters = 64, 401
    q, k, v = noisy_tokens(n)
    bias = torch.stack([torch.zeros(n, n), hub(n, 1000), torch.zeros(n, n)])
    inputs = [x.detach().requires_grad_() for x in (q, k, v, torch.full((3,), 0.97))]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    got = sinkhorn_attention(*inputs[:3], bias, n_iters=n_iters, tau=inputs[3], gradient="implicit", backend=backend)
    exact = oracle.attention(*doubles[:3], n_iters, doubles[3], bias=bias)
    compare(got, exact, inputs, doubles, bias, n_iters)
    assert set(recomputed) == {1}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lead", [(), (1,), (2, 1, 3)])
@pytest.mark.parametrize("options", [{"tau": 0.5}, {"dropout_p": 0.4}, {"tau": 0.5, "dropout_p": 0.4}])
def test_any_number_of_leading_axes(lead, options, backend, recomputed):
    """Each head is recomputed with its own tau and its own place in the dropout, heads without an axis included."""
    inputs = [30 * torch.randn(*lead, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    d_out = torch.randn(*lead, 6, 4, dtype=torch.float64)
    both = []
    for name in (backend, "reference"):
        torch.manual_seed(3)
        out = sinkhorn_attention(*inputs, scale=1.0, n_iters=5, backend=name, **options)
        both.append([out, *torch.autograd.grad(out, inputs, d_out)])
    assert recomputed
    query, key, value = (x.detach() for x in inputs)
    keep = 1 - options.get("dropout_p", 0.0)
    d_weights = d_out @ value.mT / keep
    of_weights, of_scores = oracle.tolerances(query @ key.mT, 5, d_weights, tau=options.get("tau", 1.0))
    sums = [value, key, query, d_out]  # what weights or the scores' gradient are summed with
    each = [error / keep for error in (of_weights, of_scores, of_scores, of_weights)]
    for got, expected, error, other in zip(*both, each, sums, strict=True):
        assert_close(got, expected, atol=error * other.abs().sum(-2).max().item(), rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [40.0, 300.0])
def test_gradients_of_large_tokens_cancel_to_rounding(size, backend, recomputed):
    """Scores of size s round to s·eps; shares that did not sum to 1 would multiply that by the values and the keys."""
    tokens = size * torch.randn(30, 8, generator=torch.Generator().manual_seed(0))

    def gradient(x, backend):
        x = x.clone().requires_grad_()
        sinkhorn_attention(x, x, x, backend=backend).square().sum().backward()
        return x.grad.double()

    exact = gradient(tokens.double(), "reference")
    error = (gradient(tokens, backend) - exact).norm() / exact.norm()
    by_reference = (gradient(tokens, "reference") - exact).norm() / exact.norm()
    assert recomputed
    assert error < 5 * by_reference
