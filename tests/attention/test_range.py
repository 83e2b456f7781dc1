"""Numbers near the ends of the floating-point range: the kernel domain where it is exact, else the log domain."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_attention
from sinkformers.core import log_domain
from tests import oracle

BACKENDS = ["torch", "native", "reference"]


def attended(attend, inputs, d_out):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [10, 40, 65])
@pytest.mark.parametrize("size", [1e8, 1e15, 1e28])
@pytest.mark.parametrize("n_iters", [2, 3])
def test_large_values_of_a_key_that_lies_low(backend, depth, size, n_iters):
    """A column step lifts the key by e^depth; that times its value is beyond float32, and the output is not."""
    tokens = [torch.randn(12, 4), torch.randn(13, 4), torch.randn(13, 5)]
    bias = torch.zeros(12, 13)
    bias[:, 3] = -depth
    d_out = torch.randn(12, 5)
    large = [*tokens[:2], size * tokens[2], bias]
    got = attended(lambda *x: sinkhorn_attention(*x, n_iters=n_iters, backend=backend), large, d_out)
    doubles = [x.double() for x in large]
    exact = attended(lambda q, k, v, b: oracle.attention(q, k, v, n_iters, bias=b), doubles, d_out)
    scores = tokens[0] @ tokens[1].mT / 2 + bias
    tolerance, grad_tolerance = oracle.tolerances(scores, n_iters, d_out @ tokens[2].mT)
    largest = size * tokens[2].abs().max().item()
    assert_close(got[0].double(), exact[0], atol=tolerance * 13 * largest, rtol=0)
    for place, (a, b) in enumerate(zip(got[1:], exact[1:], strict=True)):
        # Scores' gradients are as large as the values; that of the values is a sum of weights times d_out.
        atol = tolerance * d_out.abs().sum(0).max().item() if place == 2 else grad_tolerance * size * 4
        assert_close(a.double(), b, atol=atol, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("size", [1e4, 1e7, 1e9, 1e11, 1e13])
def test_a_gradient_of_any_size_that_overflows_falls_back_to_the_log_domain(backend, size):
    """Where the kernel is zero, the product of two factors must not overflow, whichever of the two is the larger."""
    scores = torch.zeros(20, 20)
    scores[:, 3] = -65
    scores[0, 3] = -120
    d_weights = size * torch.randn(20, 20)
    (_, grad) = attended(lambda c: sinkhorn(c, n_iters=5, backend=backend), [scores], d_weights)
    (_, exact) = attended(lambda c: oracle.weights(c, 5), [scores.double()], d_weights)
    _, tolerance = oracle.tolerances(scores, 5, d_weights)
    assert_close(grad.double(), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "m"), [(12, 13), (37, 41)])
@pytest.mark.parametrize("n_iters", [3, 4])
def test_the_gradient_of_tau_where_one_matrix_falls_back(backend, n, m, n_iters, monkeypatch):
    """The others keep theirs, and each goes to its own tau."""
    calls, original = [], log_domain.potentials
    monkeypatch.setattr(log_domain, "potentials", lambda p, *a: calls.append(len(p.scores)) or original(p, *a))
    scores = torch.randn(3, n, m, dtype=torch.float64)
    scores[1, :, 2] -= 1000
    tau = torch.tensor([0.3, 0.9, 0.6], dtype=torch.float64)
    d_weights = torch.randn(3, n, m, dtype=torch.float64)
    got = attended(lambda c, t: sinkhorn(c, n_iters=n_iters, tau=t, backend=backend), [scores, tau], d_weights)
    exact = attended(lambda c, t: oracle.batch_weights(c, n_iters, t), [scores, tau], d_weights)
    assert backend == "reference" or set(calls) == {1}
    for a, b in zip(got, exact, strict=True):
        # Potentials of size 1000 carry 1000·eps, in the gradient of tau as a factor of a sum over m columns.
        assert_close(a, b, atol=1000 * m * 1000 * 2.3e-16, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_padding_alone_sends_no_head_to_the_log_domain(backend, monkeypatch):
    """A text of nothing but padding least of all: what stands there would be recomputed, at many times the price."""
    monkeypatch.setattr(log_domain, "potentials", lambda *_: pytest.fail("in the log domain"))
    valid = torch.arange(11) < torch.tensor([[11], [6], [0]])
    inputs = [torch.randn(3, 2, 11, width) for width in (4, 4, 5)]
    for n_iters in (1, 2, 5):
        options = {"n_iters": n_iters, "query_mask": valid, "key_mask": valid, "backend": backend}
        attended(lambda *x: sinkhorn_attention(*x, **options), inputs, torch.randn(3, 2, 11, 5))  # noqa: B023
