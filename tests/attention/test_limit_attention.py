"""`sinkhorn_attention(n_iters=math.inf)`: output and every gradient beside thousands of steps in float64."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from tests import limit_reference
from tests.limit_reference import BACKENDS, tokens

N, M = 7, 11
TOL = 1e-11
# Output and gradients are of order 1, and their derivatives in the column sums at most some hundred.
CLOSE = {"atol": 1e3 * TOL, "rtol": 0}
QUERIES, KEYS = torch.arange(N) != 3, torch.arange(M) < torch.tensor([[M], [8]])
ENTRIES = (torch.arange(N)[:, None] * M / N - torch.arange(M)).abs() > 1
WINDOW = (torch.arange(M)[:, None] - torch.arange(M)).abs() <= 3
FLOAT = torch.zeros(N, M).double().masked_fill(~ENTRIES, -torch.inf)

# Options of the call, and what the reference is given for them.
MASKS = {
    "none": ({}, {}),
    "queries": ({"query_mask": QUERIES}, {"valid": QUERIES[:, None]}),
    "keys": ({"key_mask": KEYS}, {"valid": KEYS[:, None, None]}),
    "both": ({"query_mask": QUERIES, "key_mask": KEYS}, {"valid": QUERIES[:, None] & KEYS[:, None, None]}),
    "l2": ({"cost": "l2"}, {"cost": "l2"}),
    "l2 and keys": ({"cost": "l2", "key_mask": KEYS}, {"cost": "l2", "valid": KEYS[:, None, None]}),
}
TAUS = {"one": 1.0, "number": 0.8, "by head": torch.tensor([1.0, 0.3, 0.95]).double()}


def leaves(inputs):
    return [x.detach().clone().requires_grad_() for x in inputs]


def compare(attend, expected, inputs, close=CLOSE):
    """Output and gradients of two functions of the same inputs."""
    found = []
    for function in (attend, expected):
        given = leaves(inputs)
        out = function(*given)
        torch.manual_seed(11)
        d_out = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
        found.append([out, *torch.autograd.grad(out, given, d_out)])
    for got, exact in zip(*found, strict=True):
        assert_close(got, exact, **close)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("case", MASKS)
def test_output_and_gradients(case, tau, backend):
    options, reference = MASKS[case]
    inputs = [*tokens(2, 3, n=N, m=M), torch.randn(3, N, M).double()]
    if tau == "by head":
        inputs.append(TAUS[tau])
    settings = {"n_iters": math.inf, "tol": TOL, "backend": backend, **options}

    def attend(query, key, value, bias, tau=TAUS[tau]):
        return sinkhorn_attention(query, key, value, bias, tau=tau, **settings)

    def expected(query, key, value, bias, tau=TAUS[tau]):
        return limit_reference.attention(query, key, value, bias, tau, **reference)

    compare(attend, expected, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [ENTRIES, ENTRIES.expand(2, 1, N, M), FLOAT], ids=["entries", "batch", "float"])
def test_masked_entries(mask, backend):
    def attend(*inputs):
        return sinkhorn_attention(*inputs, mask, n_iters=math.inf, tol=TOL, backend=backend)

    compare(attend, lambda *inputs: limit_reference.attention(*inputs, valid=ENTRIES), tokens(2, 3, n=N, m=M))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_with_minus_infinity_has_its_gradient_elsewhere(backend):
    bias = torch.randn(3, N, M).double().masked_fill(~ENTRIES, -torch.inf)

    def attend(*inputs):
        return sinkhorn_attention(*inputs, n_iters=math.inf, tol=TOL, backend=backend)

    compare(attend, limit_reference.attention, [*tokens(2, 3, n=N, m=M), bias])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_windows(tau, backend):
    def attend(*inputs):
        return sinkhorn_attention(*inputs, WINDOW, n_iters=math.inf, tol=TOL, tau=tau, backend=backend)

    def expected(*inputs):
        return limit_reference.attention(*inputs, tau=tau, valid=WINDOW)

    compare(attend, expected, tokens(2, n=M, m=M))


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_heads(backend):
    (query, *_), (_, key, value) = tokens(2, 6), tokens(2, 3)

    def attend(*inputs):
        return sinkhorn_attention(*inputs, enable_gqa=True, n_iters=math.inf, tol=TOL, backend=backend)

    def expected(query, *others):
        return limit_reference.attention(query, *(x.repeat_interleave(2, -3) for x in others))

    compare(attend, expected, [query, key, value])


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_follows_the_seed(backend):
    """Values that are the identity show which weights were kept."""
    settings = {"dropout_p": 0.4, "n_iters": math.inf, "tol": TOL, "backend": backend}
    query, key, value = tokens(2, 3, n=N, m=M)
    torch.manual_seed(5)
    kept = sinkhorn_attention(query, key, torch.eye(M).double().expand(2, 3, M, M), **settings) != 0
    assert 0.4 < kept.double().mean() < 0.8

    def attend(*inputs):
        torch.manual_seed(5)
        return sinkhorn_attention(*inputs, **settings)

    def expected(*inputs):
        return limit_reference.attention(*inputs, kept=kept, dropout_p=0.4)

    compare(attend, expected, [query, key, value])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize(("n", "m"), [(7, 11), (11, 7), (1, 5), (5, 1), (1, 1)])
def test_shapes(n, m, lead, backend):
    def attend(*inputs):
        return sinkhorn_attention(*inputs, n_iters=math.inf, tol=TOL, backend=backend)

    compare(attend, limit_reference.attention, tokens(*lead, n=n, m=m))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts(backend):
    """Transposed heads, every second feature, and heads that are one tensor expanded."""
    heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tokens(2, 3)]
    strided = [x.repeat_interleave(2, -1)[..., ::2] for x in tokens(2, 3)]
    shared = [x[:1].expand(4, -1, -1) for x in tokens(3)]
    assert not any(x.is_contiguous() for x in (*heads, *strided, *shared))
    for inputs in (heads, strided, shared):
        given = [x.detach().requires_grad_() for x in inputs]
        out = sinkhorn_attention(*given, n_iters=math.inf, tol=TOL, backend=backend)
        exact = limit_reference.attention(*given)
        d_out = torch.randn(out.shape).double()
        pairs = zip(torch.autograd.grad(out, given, d_out), torch.autograd.grad(exact, given, d_out), strict=True)
        for got, expected in [(out, exact), *pairs]:
            assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_axes_broadcast(backend):
    (query, *_), (_, key, _), (*_, value) = tokens(2, 1), tokens(3), tokens(1, 3)

    def attend(*inputs):
        return sinkhorn_attention(*inputs, n_iters=math.inf, tol=TOL, backend=backend)

    compare(attend, limit_reference.attention, [query, key, value])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, backend):
    """The steps run in float32, so the error is that of rounding outputs and gradients of order 1, and of `tol`."""
    inputs = leaves(tokens(2, 3, dtype=dtype))
    out = sinkhorn_attention(*inputs, n_iters=math.inf, tol=1e-5, backend=backend)
    exact = limit_reference.attention(*(x.double() for x in inputs))
    d_out = torch.randn(out.shape, dtype=dtype)
    grads, expected = torch.autograd.grad(out, inputs, d_out), torch.autograd.grad(exact, inputs, d_out.double())
    assert all(x.dtype == dtype for x in (out, *grads))
    for got, right in [(out, exact), *zip(grads, expected, strict=True)]:
        close = 4 * torch.finfo(dtype).eps * max(1.0, right.abs().max().item())
        assert_close(got.double(), right.double(), atol=close, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("std", [1, 2, 4])
def test_the_error_of_the_gradient_is_of_the_order_of_tol(std, backend):
    """Over six decades its logarithm has a slope of about 1 against that of `tol`: 1.01, 1.10 and 1.09 in torch."""
    query, key, value = tokens(32, n=13, m=13)
    inputs = leaves([std * query, key, value])
    exact = limit_reference.attention(*inputs, steps=6001, unrolled=3001)
    d_out = torch.randn(exact.shape).double()
    expected = torch.autograd.grad(exact, inputs, d_out)
    tols = torch.logspace(-2, -8, 13, dtype=torch.float64)
    errors = []
    for tol in tols.tolist():
        out = sinkhorn_attention(*inputs, n_iters=math.inf, tol=tol, backend=backend)
        grads = torch.autograd.grad(out, inputs, d_out)
        errors.append(max(((a - b).norm() / b.norm()).item() for a, b in zip(grads, expected, strict=True)))
        assert errors[-1] < 2 * tol
    x, y = tols.log(), torch.tensor(errors, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    assert 0.7 < (x @ y / (x @ x)).item() < 1.3
