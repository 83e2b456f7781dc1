"""Ranks, strides and empty sizes of causal attention, by every backend."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from sinkformers import SinkhornCache, causal_sinkhorn, sinkhorn_attention
from tests.causal_cases import BACKENDS, MASKS, N, attend, causal_gradients, tokens

CLOSE = {"atol": 1e-12, "rtol": 0}


def transposed(x):
    return x.mT.contiguous().mT


def heads_last(x):
    """As projections leave them: (batch, tokens, heads, features) with two axes exchanged."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def strided(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def spaced(x):
    return torch.stack([torch.full_like(x, torch.nan), x], -2).flatten(-3, -2)[..., 1::2, :]


LAYOUTS = {
    "transposed": transposed,
    "heads last": heads_last,
    "every other feature": strided,
    "every other row": spaced,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_do_not_matter(backend, layout):
    """Of tokens, a bias, and the gradient that comes in."""
    given = [x.detach() for x in tokens(MASKS["triangle"], 2, 3)]
    bias = torch.randn(2, 3, N, N, dtype=torch.float64).masked_fill(~MASKS["triangle"], -torch.inf)
    change, results = LAYOUTS[layout], []
    for kept in (True, False):
        inputs = [(x.clone() if kept else change(x)).requires_grad_() for x in (*given, bias)]
        assert kept or not inputs[0].is_contiguous()
        out = attend(*inputs, n_iters=5, backend=backend)
        d_out = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        results.append([out, *causal_gradients(out, inputs, d_out=d_out if kept else change(d_out))])
    for plain, other in zip(*results, strict=True):
        assert_close(other, plain, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_tokens_and_gradients(backend):
    """One query for all samples, one key for all heads; a sum has the gradient of an expanded one."""
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 3, N, 5), (2, 1, N, 5), (3, N, 4)))
    results = []
    for full in (False, True):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        views = [x.expand(2, 3, N, -1) for x in inputs]
        views = [x.contiguous() for x in views] if full else inputs
        out = attend(*views, is_causal=True, backend=backend)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for plain, other in zip(*results, strict=True):
        assert_close(other, plain, **CLOSE)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_axes(backend, lead):
    given = tokens(MASKS["triangle"], *lead)
    flat = [x.detach().reshape(-1, N, x.shape[-1]).requires_grad_() for x in given]
    out, expected = (attend(*x, is_causal=True, n_iters=5, backend=backend) for x in (given, flat))
    assert out.shape == (*lead, N, 3)
    assert_close(out.reshape(expected.shape), expected, **CLOSE)
    d_out = torch.randn_like(out)
    grads = causal_gradients(expected, flat, d_out=d_out.reshape(expected.shape))
    for got, exact in zip(causal_gradients(out, given, d_out=d_out), grads, strict=True):
        assert_close(got.reshape(exact.shape), exact, **CLOSE)
    scores = torch.randn(*lead, N, N)
    assert_close(causal_sinkhorn(scores).reshape(-1, N, N), causal_sinkhorn(scores.reshape(-1, N, N)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_heads(backend):
    query, key, value = (torch.randn(2, h, N, 5, dtype=torch.float64, requires_grad=True) for h in (6, 3, 2))
    out = attend(query, key, value, is_causal=True, enable_gqa=True, backend=backend)
    repeated = attend(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(3, 1), is_causal=True, backend=backend
    )
    assert_close(out, repeated, **CLOSE)
    for a, b in zip(*(causal_gradients(x, (query, key, value)) for x in (out, repeated)), strict=True):
        assert_close(a, b, **CLOSE)


FULL = {"b": 2, "h": 3, "n": 5, "m": 4, "d": 6, "e": 7}
SIZES = [{**FULL, **dict.fromkeys(zeros, 0)} for count in (1, 2, 6) for zeros in itertools.combinations(FULL, count)]


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_sizes_of_zero(backend):
    """An empty sum is 0, and every gradient exists; queries without features attend uniformly."""
    for size, n_iters in itertools.product(SIZES, (1, 3)):
        b, h, n, m, d, e = size.values()
        given = [torch.randn(shape, requires_grad=True) for shape in ((b, h, n, d), (b, h, m, d), (b, h, m, e))]
        learned = backend != "reference" or n_iters > 1  # which is torch's own SoftMax at one step
        given += [torch.full((1,), 0.5, requires_grad=learned)]
        out = attend(*given[:3], n_iters=n_iters, tau=given[3], backend=backend)
        inputs = given if learned else given[:3]
        assert out.shape == (b, h, n, e)
        if d == 0 and out.numel():
            mean = given[2].mean(-2, keepdim=True) if m else torch.zeros(b, h, 1, e)
            assert_close(out, mean.expand(out.shape), atol=1e-6, rtol=0)
        for x, grad in zip(inputs, torch.autograd.grad(out.square().sum(), inputs), strict=True):
            assert grad.shape == x.shape
            assert grad.isfinite().all()
    assert causal_sinkhorn(torch.randn(2, 0, 0)).shape == (2, 0, 0)
    assert causal_sinkhorn(torch.randn(0, 3, 3), definition="prefix").shape == (0, 3, 3)


@pytest.mark.parametrize("size", [{**FULL, "m": 5, name: 0} for name in ("b", "h", "d", "e")], ids=str)
@pytest.mark.parametrize("n_iters", [1, 3])
def test_a_cache_of_sizes_of_zero(size, n_iters):
    b, h, n, m, d, e = size.values()
    given, layer = [torch.randn(shape) for shape in ((b, h, n, d), (b, h, m, d), (b, h, m, e))], SinkhornCache()[0]
    for _ in range(3):
        out = sinkhorn_attention(*given, is_causal=True, n_iters=n_iters, cache=layer)
        assert out.shape == (b, h, n, e)
    assert len(layer) == 15
    assert layer.key.shape[-1] == d
