"""The two domains, each for itself, and the hand-over between them."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_attention
from sinkformers.core import kernel_domain, log_domain
from sinkformers.core.definition import Definition
from sinkformers.core.problem import pose
from tests import oracle


def problem_and_oracle(n=7, m=11):
    """A problem with masks and masses, and the same for the oracle."""
    scores = 2 * torch.randn(n, m, dtype=torch.float64)
    mask = torch.rand(n, m) > 0.25
    mask[2], mask[:, 4] = False, False
    row, col = torch.rand(n).double().softmax(-1), torch.rand(m).double().softmax(-1)
    return scores, mask, row, col


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("masses", [False, True])
@pytest.mark.parametrize("value", [None, 0.0, 0.4, 1.0])
def test_the_log_domain_is_the_definition(n_iters, masses, value):
    scores, mask, row, col = problem_and_oracle()
    row, col = (row, col) if masses else (None, None)
    tau = None if value is None else torch.tensor([value], dtype=torch.float64)
    problem = pose(scores[None], mask[None], *(None if x is None else x[None] for x in (row, col)))
    exact_scores = scores.clone().requires_grad_()
    exact_tau = torch.tensor(1.0 if value is None else value, dtype=torch.float64, requires_grad=True)
    exact = oracle.weights(exact_scores, n_iters, exact_tau, mask, row, col)
    run = log_domain.potentials(problem, tau, Definition(n_iters))
    assert_close(log_domain.weights(run, problem, tau)[0], exact, atol=1e-13, rtol=0)
    d_weights = torch.randn_like(scores).masked_fill(~mask, 0)
    grad, d_tau = log_domain.gradient(problem, tau, Definition(n_iters), d_weights[None])
    expected, expected_tau = torch.autograd.grad(exact, (exact_scores, exact_tau), d_weights, allow_unused=True)
    assert_close(grad[0], expected, atol=1e-13, rtol=0)
    if tau is None:
        assert d_tau is None
    elif expected_tau is not None:
        assert_close(d_tau[0], expected_tau, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("dtype", "inside", "outside"), [(torch.float32, 60, 76), (torch.float64, 600, 660)])
def test_what_is_safe(dtype, inside, outside):
    """A column so far below its rows that v passes 1e30 (1e280) leaves the range; well before, nothing is lost."""
    scores = torch.zeros(3, 5, 5, dtype=dtype)
    scores[1, :, 3] = -inside
    scores[2, :, 3] = -outside
    problem = pose(scores, None, None, None)
    r = kernel_domain.row_shift(problem)
    steps = kernel_domain.iterate(kernel_domain.exponentiate(scores, r), problem, None, r, Definition(3))
    assert steps.safe.tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vanishing_exponents_are_exact_zeros(dtype):
    scores = torch.tensor([[0.0, -86.0, -88.0, -100.0, -705.0, -710.0, -740.0]], dtype=dtype)
    kernel = kernel_domain.exponentiate(scores, scores.amax(-1))
    limit = 87 if dtype == torch.float32 else 708
    assert (kernel != 0).equal(scores >= -limit)


@pytest.mark.parametrize("n_iters", [3, 4, 7])
def test_the_log_domain_gives_the_same_for_every_matrix(monkeypatch, n_iters):
    """With every matrix unsafe, the log domain gives weights, gradients and the implicit gradient."""
    scores = torch.randn(3, 7, 11, dtype=torch.float64, requires_grad=True)
    mask, tau = torch.rand(7, 11) > 0.2, torch.tensor([0.3, 0.7, 1.0], dtype=torch.float64, requires_grad=True)
    tokens = [torch.randn(3, n, 4, dtype=torch.float64, requires_grad=True) for n in (7, 11, 11)]

    def everything():
        torch.manual_seed(1)
        weights = sinkhorn(scores, n_iters=n_iters, tau=tau, mask=mask, backend="torch")
        grads = torch.autograd.grad(weights, (scores, tau), torch.randn(3, 7, 11, dtype=torch.float64))
        out = sinkhorn_attention(*tokens, mask, 0.2, n_iters=n_iters, tau=tau, backend="torch")
        grads += torch.autograd.grad(out, (*tokens, tau), torch.ones_like(out))
        if n_iters % 2:
            out = sinkhorn_attention(*tokens, n_iters=n_iters, tau=tau, gradient="implicit", backend="torch")
            grads += torch.autograd.grad(out, (*tokens, tau), torch.ones_like(out))
        return [weights, out, *grads]

    expected = everything()
    calls, original = [], log_domain.potentials
    monkeypatch.setattr(log_domain, "potentials", lambda *a: calls.append(1) or original(*a))
    monkeypatch.setattr(kernel_domain, "SAFE_PRODUCT", {torch.float64: 0.0})
    for got, same in zip(everything(), expected, strict=True):
        assert_close(got, same, atol=1e-12, rtol=0)
    assert len(calls) >= 4


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_gradient_that_overflows_falls_back_to_the_log_domain(backend):
    """u and v are in range, but times a large incoming gradient they are not, where the kernel is zero."""
    scores = torch.zeros(20, 20)
    scores[:, 3] = -65
    scores[0, 3] = -120
    scores.requires_grad_()
    d_weights = 1e15 * torch.randn(20, 20)
    (grad,) = torch.autograd.grad(sinkhorn(scores, n_iters=5, backend=backend), scores, d_weights)
    exact_scores = scores.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(oracle.weights(exact_scores, 5), exact_scores, d_weights.double())
    assert grad.isfinite().all()
    assert_close(grad.double(), exact, atol=1e-3 * exact.abs().max().item(), rtol=0)


def test_an_attention_gradient_that_overflows_falls_back_to_the_log_domain():
    q, k = torch.zeros(20, 4), torch.zeros(20, 4)
    bias = torch.zeros(20, 20)
    bias[:, 3] = -65
    bias[0, 3] = -120
    inputs = [x.requires_grad_() for x in (q, k, torch.randn(20, 4))]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    d_out = 1e15 * torch.randn(20, 4)
    got = torch.autograd.grad(sinkhorn_attention(*inputs, bias, n_iters=5, backend="native"), inputs, d_out)
    exact = torch.autograd.grad(oracle.attention(*doubles, 5, bias=bias), doubles, d_out.double())
    for a, b in zip(got, exact, strict=True):
        assert_close(a.double(), b, atol=1e-3 * max(1.0, b.abs().max().item()), rtol=0)


def test_masses_are_renormalised_over_what_is_left():
    scores, mask, row, col = problem_and_oracle()
    for options in ({"n_iters": 4}, {"n_iters": 5, "tau": 0.5}):
        got = sinkhorn(scores, mask=mask, row_mass=row, col_mass=col, backend="torch", **options)
        assert_close(got, oracle.weights(scores, mask=mask, row_mass=row, col_mass=col, **options), atol=1e-13, rtol=0)
