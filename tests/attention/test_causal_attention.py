"""Causal attention by every backend: against loops written from the formulas, and against finite differences."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from sinkformers import backend_for, causal_sinkhorn, sinkhorn_attention
from tests import causal_oracle as oracle
from tests.causal_cases import BACKENDS, MASKS, N_ITERS, SQUARE, N, attend, causal_gradients, scores_of, tokens

COSTS = ["dot", "l2"]


def bounds(query, key, value, mask, n_iters, d_out=None):
    """Of the output, a mean of values; and of the gradients, sums over n rows of products with scores' gradients."""
    per_weight = oracle.tolerance(scores_of(query, key), mask, n_iters, query.dtype)
    size = value.detach().abs().max().item()
    if d_out is None:
        return per_weight * max(1.0, size)
    tokens = max(x.detach().abs().max().item() for x in (query, key, value))
    return (n_iters + 1) * sum(mask.shape) * per_weight * max(1.0, tokens) ** 2 * d_out.abs().max().item()


@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_formulas(backend, name, n_iters):
    mask = MASKS[name]
    query, key, value = tokens(mask, 2, 3, dtype=torch.float32)
    tau = torch.tensor([0.2, 0.7, 1.0])
    out = attend(query, key, value, mask, n_iters=n_iters, tau=tau, backend=backend)
    exact = oracle.attention(query, key, value, n_iters, tau, mask)
    assert_close(out.double(), exact, atol=bounds(query, key, value, mask, n_iters), rtol=0)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_triangle_by_name_in_float64(backend, cost):
    query, key, value = tokens(MASKS["triangle"], 2)
    exact = oracle.attention(query, key, value, 5, cost=cost, scale=0.7)
    out = attend(query, key, value, is_causal=True, n_iters=5, cost=cost, scale=0.7, backend=backend)
    assert_close(out, exact, atol=1e-13, rtol=0)
    out = attend(query, key, value, MASKS["triangle"], n_iters=5, cost=cost, scale=0.7, backend=backend)
    assert_close(out, exact, atol=1e-13, rtol=0)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", SQUARE)
def test_prefix_is_the_formulas(name, cost):
    """Scores above the diagonal are read, where a bias that masks them says nothing."""
    mask = MASKS[name]
    query, key, value = tokens(mask, 2)
    bias = torch.randn(N, N, dtype=torch.float64)
    for given, added in ((mask, None), (bias.masked_fill(~mask, -math.inf), bias.masked_fill(~mask, 0.0))):
        out = sinkhorn_attention(query, key, value, given, causal="prefix", n_iters=5, tau=0.6, cost=cost)
        exact = oracle.attention(query, key, value, 5, 0.6, mask, added, cost=cost, definition="prefix")
        assert_close(out, exact, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_it_is_the_weights_times_the_values(name, backend):
    mask = MASKS[name]
    query, key, value = tokens(mask, 2)
    bias = torch.randn(2, *mask.shape, dtype=torch.float64)
    out = attend(query, key, value, bias.masked_fill(~mask, -math.inf), backend=backend)
    weights = causal_sinkhorn(scores_of(query, key) + bias, mask=mask)
    assert_close(out, weights @ value, atol=1e-13, rtol=0)


@pytest.mark.parametrize("tau", [1.0, 0.0])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_one_step_or_no_relaxation_is_sdpa(backend, tau):
    query, key, value = tokens(MASKS["triangle"], 2, 3)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    options = {"n_iters": 3 if tau == 0 else 1, "tau": tau, "causal": "streaming", "backend": backend}
    assert_close(attend(query, key, value, is_causal=True, **options), exact, atol=1e-14, rtol=0)
    assert_close(attend(query, key, value, MASKS["triangle"], **options), exact, atol=1e-14, rtol=0)
    if backend == "auto":
        assert backend_for(query, key, value, is_causal=True, **options) == "sdpa"


@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("options", ["triangle", "mask and bias", "l2", "tau per head", "cross"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend, options, n_iters):
    mask = MASKS["cross-attention" if options == "cross" else "window"][3:9, 3:]
    query, key, value = tokens(mask, 2, d=3, e=2)
    bias = torch.randn(2, 1, mask.shape[-1], dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.4, 0.9], dtype=torch.float64, requires_grad=True)
    given = {
        "triangle": ((query, key[:, :6].detach().requires_grad_(), value[:, :6].detach().requires_grad_()), {}),
        "mask and bias": ((query, key, value, bias), {}),
        "l2": ((query, key, value), {"cost": "l2"}),
        "tau per head": ((query, key, value, tau), {}),
        "cross": ((query, key, value, tau), {}),
    }[options]

    def function(query, key, value, extra=None):
        kwargs = dict(given[1])
        if extra is not None and extra.dim() == 1:
            kwargs["tau"] = extra
        if options == "triangle":
            kwargs["is_causal"] = True
        else:
            kwargs["attn_mask"] = mask if extra is None or extra.dim() == 1 else extra.masked_fill(~mask, -math.inf)
        return attend(query, key, value, n_iters=n_iters, backend=backend, **kwargs)

    # Compiled kernels add in an order that depends on threads, never by more than rounding.
    assert torch.autograd.gradcheck(function, given[0], fast_mode=True, nondet_tol=1e-12)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_gradients_are_those_of_the_loop(backend, name):
    mask = MASKS[name]
    query, key, value = tokens(mask, 2, 3, dtype=torch.float32)
    bias, tau = torch.randn(3, *mask.shape, requires_grad=True), torch.tensor([[0.2], [1.0]], requires_grad=True)
    given, results = (query, key, value, bias, tau), []
    for served, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in given]
        matrix = inputs[3].masked_fill(~mask, -math.inf)
        out = attend(*inputs[:3], matrix, n_iters=5, tau=inputs[4], backend=served)
        results.append([out, *causal_gradients(out, inputs)])
    bound = bounds(*given[:3], mask, 5, torch.tensor(4.0))  # normal numbers
    for got, exact in zip(*results, strict=True):
        assert_close(got.double(), exact, atol=bound * max(1.0, exact.abs().max().item()), rtol=0)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("n", [127, 128, 129, 300])
def test_blocks_of_rows_carry_the_sums_along(backend, n):
    """Sizes around those of blocks, forward and backward."""
    query, key, value = tokens(torch.ones(n, n), 2, d=4)
    given, results = (query, key, value), []
    for served in (backend, "reference"):
        out = attend(*given, is_causal=True, n_iters=3, backend=served)
        results.append([out, *causal_gradients(out, given)])
    for got, exact in zip(*results, strict=True):
        assert_close(got, exact, atol=1e-12 * max(1.0, exact.abs().max().item()), rtol=0)
