"""Half precision goes in and comes out, and costs no more than that: the rounding of inputs, outputs and gradients."""

import pytest
import torch

from sinkformers import sinkhorn_attention
from tests import oracle
from tests.saved import saved_bytes

HALVES = [torch.float16, torch.bfloat16]


def tokens(dtype, std, n=47, m=53, d=16, e=24):
    query, key, value, d_out = (torch.randn(2, 3, *shape) for shape in ((n, d), (m, d), (m, e), (n, e)))
    return [(std * query).to(dtype), key.to(dtype), value.to(dtype)], d_out.to(dtype)


def results(attend, inputs, d_out):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def eager_softmax(query, key, value):
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def exact(function, inputs, d_out):
    return results(function, [x.double() for x in inputs], d_out.double())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("std", [1, 4, 8, 16, 30])
@pytest.mark.parametrize("n_iters", [2, 3, 21])
@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_the_error_is_that_of_rounding_the_result(dtype, std, n_iters, backend):
    """Within twice the error of the exact result rounded to half precision, and of eager SoftMax attention.

    Inside, everything is float32, whose errors are hundreds of times smaller than that rounding unless they are
    magnified. Sharp scores magnify: the gradient of a score is a difference of two nearly equal numbers.
    """
    inputs, d_out = tokens(dtype, std)
    got = results(lambda *x: sinkhorn_attention(*x, n_iters=n_iters, backend=backend), inputs, d_out)
    true = exact(lambda *x: oracle.attention(*x, n_iters), inputs, d_out)
    eager, true_softmax = results(eager_softmax, inputs, d_out), exact(eager_softmax, inputs, d_out)
    for ours, right, theirs, softmax in zip(got, true, eager, true_softmax, strict=True):
        assert ours.dtype == dtype
        assert error(ours, right) <= 2 * error(right.to(dtype), right)
        assert error(ours, right) <= 2 * error(theirs, softmax)


def error(found, right):
    return ((found.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_bias_and_tau_get_gradients_as_good(dtype, backend):
    inputs, d_out = tokens(dtype, 8)
    bias = torch.randn(1, 3, 47, 53).to(dtype)
    tau = torch.tensor([[[0.3], [0.7], [1.0]]], dtype=dtype)[..., 0]

    def attend(query, key, value, bias, tau):
        return sinkhorn_attention(query, key, value, bias, tau=tau, n_iters=5, backend=backend)

    got = results(attend, [*inputs, bias, tau], d_out)
    true = exact(lambda q, k, v, b, t: oracle.attention(q, k, v, 5, t, bias=b), [*inputs, bias, tau], d_out)
    for ours, right in zip(got, true, strict=True):
        assert error(ours, right) <= 2 * max(error(right.to(dtype), right), torch.finfo(dtype).eps / 4)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_saved_for_backward(dtype):
    """Inputs, the output in float32, and one vector per step: no matrix."""
    query, key, value = (torch.randn(1, 2, 256, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    saved = saved_bytes(lambda: sinkhorn_attention(query, key, value, n_iters=5))
    vectors = 2 * 256 * (5 + 1) * 4
    assert saved <= query.nbytes * 3 + query.nbytes * 2 + vectors + 64
