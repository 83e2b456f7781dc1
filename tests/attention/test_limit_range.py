"""Attention at the limit where numbers are very small, very large, or far apart."""

import math
import warnings

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from sinkformers.attention.functional import attention_with_evidence
from tests.limit_reference import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tau", "tol"), [(1e-5, 1e-3), (1e-3, 1e-5), (0.01, 1e-6)])
def test_a_small_tau_needs_few_products(tau, tol, backend):
    """Two steps contract by tau; the rounding of potentials must not be multiplied by 1/tau."""
    query, key, value = torch.randn(3, 1, 8, 4).unbind()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, evidence = attention_with_evidence(query, key, value, n_iters=math.inf, tau=tau, tol=tol, backend=backend)
    assert evidence.products.item() <= 9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-25, 1e-22, 1e20])
@pytest.mark.parametrize("scaled", ["d_out", "value"])
def test_the_gradient_is_linear_in_what_comes_in_and_in_the_values(scaled, size, backend):
    query, key, value = torch.randn(3, 1, 12, 4).unbind()
    query, d_out = (2 * query).requires_grad_(), torch.randn(1, 12, 4)

    def gradient(value_by, d_out_by):
        out = sinkhorn_attention(query, key, value * value_by, n_iters=math.inf, tol=1e-5, backend=backend)
        return torch.autograd.grad(out, query, d_out * d_out_by)[0]

    expected = gradient(1.0, 1.0)
    got = gradient(size, 1.0) if scaled == "value" else gradient(1.0, size)
    assert_close(got / size, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_columns_far_below_the_others_leave_the_gradient_of_tau_alone(seed, backend):
    torch.manual_seed(seed)
    query, key, value, d_out = torch.randn(4, 1, 8, 4, dtype=torch.float64).unbind()
    bias = torch.zeros(8, 8, dtype=torch.float64)
    bias[:, :4] -= 1000

    def gradient(dtype, tol):
        tau = torch.ones(1, dtype=dtype, requires_grad=True)
        tensors = [x.to(dtype) for x in (query, key, value, bias)]
        out = sinkhorn_attention(*tensors, n_iters=math.inf, tau=tau, tol=tol, backend=backend)
        return torch.autograd.grad(out, tau, d_out.to(dtype))[0].double()

    assert_close(gradient(torch.float32, 1e-4), gradient(torch.float64, 1e-12), rtol=2e-3, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_matrices_of_sharp_scores_converge(backend):
    """One matrix in which a step that moved columns far against each other led to a state that led back."""
    cycle = [[-81.066, 31.575, 5.446, 151.773], [-33.659, -6.506, 28.701, 74.929]]
    cycle += [[-87.048, 95.066, -60.176, 118.239], [47.349, -44.207, 21.497, -63.387]]
    scores = 300 * torch.randn(500, 4, 4, generator=torch.Generator().manual_seed(0))
    scores[0] = torch.tensor(cycle)
    value = torch.eye(4).expand(500, 4, 4)
    _, evidence = attention_with_evidence(
        torch.eye(4).expand(500, 4, 4), scores.mT, value, scale=1.0, n_iters=math.inf, backend=backend
    )
    assert evidence.converged.all()
    assert evidence.products.max() <= 400
