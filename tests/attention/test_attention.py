"""Attention against float64, SoftMax attention and its own definition."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from tests import oracle
from tests.saved import saved_bytes

BACKENDS = ["torch", "native", "reference"]


def tokens(*lead, n=13, m=17, d=5, e=7, dtype=torch.float64, grad=True):
    shapes = ((*lead, n, d), (*lead, m, d), (*lead, m, e))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def gradients(out, inputs, seed=5):
    generator = torch.Generator().manual_seed(seed)
    d_out = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, inputs, d_out)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_iteration_is_softmax_attention(lead, backend, is_causal):
    q, k, v = tokens(*lead)
    got = sinkhorn_attention(q, k, v, n_iters=1, backend=backend, is_causal=is_causal)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert_close(got, expected, atol=1e-12, rtol=0)
    for a, b in zip(gradients(got, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        assert_close(a, b, atol=1e-12, rtol=0)


def test_one_iteration_costs_nothing_extra(monkeypatch):
    calls = []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(a) or original(*a, **k))
    q, k, v = tokens(2, 3, grad=False)
    sinkhorn_attention(q, k, v, n_iters=1)
    sinkhorn_attention(q, k, v, n_iters=7, tau=0)
    assert len(calls) == 2
    assert all(a.data_ptr() == b.data_ptr() for call in calls for a, b in zip(call, (q, k, v), strict=False))
    sinkhorn_attention(q, k, v, n_iters=7, tau=torch.tensor(0.0))
    assert len(calls) == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 5, 21])
def test_float64_to_1e_10(n_iters, cost, backend):
    q, k, v = inputs = tokens(2, 3)
    bias = torch.randn(3, 13, 17, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 13, 17) > 0.3
    tau = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    options = {"n_iters": n_iters, "cost": cost, "tau": tau, "backend": backend}
    got = sinkhorn_attention(q, k, v, bias.masked_fill(~mask, -torch.inf), **options)
    exact = oracle.attention(q, k, v, n_iters, tau, mask, bias, cost)
    assert_close(got, exact, atol=1e-10, rtol=0)
    for a, b in zip(gradients(got, (*inputs, bias)), gradients(exact, (*inputs, bias)), strict=True):
        assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("std", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("n_iters", [3, 21])
def test_float32(n_iters, std):
    """The scores carry eps·√d·|q||k| from the product; the rest is the operator's own tolerance, per unit of value."""
    q, k, v = inputs = tokens(2, 3, dtype=torch.float32)
    scaled = std * q
    got = sinkhorn_attention(scaled, k, v, n_iters=n_iters)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    exact = oracle.attention(std * doubles[0], *doubles[1:], n_iters)
    scores = (scaled @ k.mT / math.sqrt(5)).detach()
    tolerance, grad_tolerance = oracle.tolerances(scores, n_iters, (v.detach().abs().sum(-1) * 4)[..., None, :])
    assert_close(got.double(), exact, atol=tolerance * v.abs().max().item(), rtol=0)
    for a, b in zip(gradients(got, inputs), gradients(exact, doubles), strict=True):
        assert_close(a.double(), b, atol=grad_tolerance * max(1, std) * 17, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_iters", [3, 21])
@pytest.mark.parametrize("std", [1.0, 4.0])
def test_half_precision_errs_at_most_twice_as_much_as_eager_softmax(dtype, n_iters, std):
    q, k, v = inputs = [x.detach().to(dtype).requires_grad_() for x in tokens(2, 3, n=61, m=67, d=16, e=8)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]

    def softmax_attention(q, k, v):
        return torch.softmax(std * (q @ k.mT) / 4, -1) @ v

    def errors(got, exact):
        pairs = [(got, exact), *zip(gradients(got, inputs), gradients(exact, doubles), strict=True)]
        return [(a.double() - b).abs().max().item() for a, b in pairs]

    eager = errors(softmax_attention(*inputs), softmax_attention(*doubles))
    ours = errors(
        sinkhorn_attention(q, k, v, n_iters=n_iters, scale=std / 4), oracle.attention(*doubles, n_iters, scale=std / 4)
    )
    assert all(mine <= 2 * theirs for mine, theirs in zip(ours, eager, strict=True)), (ours, eager)


def small(*lead, n=3, m=4):
    return tokens(*lead, n=n, m=m, d=2, e=3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize(("n", "m"), [(3, 3), (2, 5), (5, 2)])
@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_gradcheck(n, m, cost, backend, n_iters):
    bias = torch.randn(2, 1, m, dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
    real = torch.tensor([[True] * (m - 1) + [False]])

    def attend(q, k, v, b, t):
        return sinkhorn_attention(
            q, k, v, b, n_iters=n_iters, tau=t, cost=cost, key_mask=real, backend=backend, dropout_p=0.0
        )

    gradcheck(attend, (*small(1, 2, n=n, m=m), bias, tau))


def test_gradcheck_on_the_softmax_route():
    bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for cost in ("dot", "l2"):
        gradcheck(lambda *x: sinkhorn_attention(*x, n_iters=1, cost=cost), (*small(2, 2), bias))  # noqa: B023


@pytest.mark.parametrize("n_iters", [1, 3])
def test_grouped_heads(n_iters):
    q = torch.randn(2, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    spread = [x.repeat_interleave(3, -3) for x in (k, v)]
    mask = torch.rand(2, 6, 5, 7) > 0.3
    for attn_mask in (None, mask):
        got = sinkhorn_attention(q, k, v, attn_mask, enable_gqa=True, n_iters=n_iters)
        expected = sinkhorn_attention(q, *spread, attn_mask, n_iters=n_iters)
        assert_close(got, expected, atol=1e-12, rtol=0)
        for a, b in zip(gradients(got, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
            assert_close(a, b, atol=1e-12, rtol=0)
    gradcheck(
        lambda q, k, v: sinkhorn_attention(q, k, v, enable_gqa=True, n_iters=n_iters), (q[:1, :, :2], k[:1], v[:1])
    )


@pytest.mark.parametrize("tau", [1.0, 0.6])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (4, 9)])
@pytest.mark.parametrize("block", [False, True])
def test_implicit_is_unrolled_where_converged(n, m, tau, block):
    q, k, v = tokens(2, n=n, m=m, d=3)
    mask = (torch.arange(n)[:, None] < 2) == (torch.arange(m) < 2 * m // n) if block else None
    options = {"n_iters": 801, "tau": tau, "attn_mask": mask}
    implicit, unrolled = (sinkhorn_attention(q, k, v, gradient=g, **options) for g in ("implicit", "unrolled"))
    assert_close(implicit, unrolled, atol=1e-12, rtol=0)
    for a, b in zip(gradients(implicit, (q, k, v)), gradients(unrolled, (q, k, v)), strict=True):
        assert_close(a, b, atol=1e-9, rtol=0)
    gradcheck(lambda *x: sinkhorn_attention(*x, gradient="implicit", **options), (q, k, v))


def test_implicit_is_not_the_gradient_of_few_steps():
    q, k, v = tokens(n=9, m=9)
    q = 6 * q
    pair = [gradients(sinkhorn_attention(q, k, v, n_iters=3, gradient=g), (k,))[0] for g in ("implicit", "unrolled")]
    assert (pair[0] - pair[1]).abs().max() > 1e-3
    assert pair[0].isfinite().all()


def test_implicit_gradient_of_tau():
    q, k, v = tokens(2, n=5, m=7)
    tau = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    gradcheck(lambda t: sinkhorn_attention(q, k, v, n_iters=401, tau=t, gradient="implicit"), tau)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_drawn_again_in_backward(backend):
    """The same seed gives the same output, and finite differences under it give the gradient."""
    q, k, v = small(2)

    def attend(q, k, v):
        torch.manual_seed(3)
        return sinkhorn_attention(q, k, v, dropout_p=0.4, n_iters=3, backend=backend)

    gradcheck(attend, (q, k, v))
    other = sinkhorn_attention(q, k, v, dropout_p=0.4, n_iters=3, backend=backend)
    assert not other.equal(attend(q, k, v))


def test_dropout_scales_what_it_keeps():
    q, k, v = tokens(3, 3, n=211, m=223, grad=False)
    eye = torch.eye(223, dtype=torch.float64).expand(3, 3, -1, -1)
    weights = sinkhorn_attention(q, k, eye, n_iters=3)
    dropped = sinkhorn_attention(q, k, eye, dropout_p=0.3, n_iters=3)
    kept = dropped != 0
    # A share of 423,477 draws with p = 0.7 lies within 5 standard deviations of it: 0.0035.
    assert abs(kept.double().mean().item() - 0.7) < 0.0035
    assert_close(dropped[kept], weights[kept] / 0.7)
    assert sinkhorn_attention(q, k, v, dropout_p=1.0, n_iters=3).eq(0).all()


def test_l2_is_the_distance():
    q, k, v = tokens(grad=False)
    distance = (q[:, None] - k).square().sum(-1)
    expected = oracle.weights(-0.5 * 0.3 * distance, 5) @ v
    assert_close(sinkhorn_attention(q, k, v, cost="l2", scale=0.3, n_iters=5), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_l2_does_not_feel_a_common_offset(n_iters, backend, padded):
    """Offset by a power of two, tokens keep bits enough; rounded beforehand, both calls see the same distances."""
    rounded = [(x.detach() * 2**10).round() / 2**10 for x in tokens(2, 3, dtype=torch.float32)]
    q, k, v = inputs = [x.requires_grad_() for x in rounded]
    mask = torch.arange(17) < 12 if padded else None
    options = {"cost": "l2", "n_iters": n_iters, "backend": backend, "key_mask": mask}
    expected = sinkhorn_attention(q, k, v, **options)
    got = sinkhorn_attention(q + 1024, k + 1024, v, **options)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    exact = oracle.attention(*doubles, n_iters, cost="l2", mask=mask)
    scores = -0.5 / math.sqrt(5) * torch.cdist(q, k).detach().square()
    tolerance, grad_tolerance = oracle.tolerances(scores, n_iters, (v.detach().abs().sum(-1) * 4)[..., None, :])
    # The mean of tokens at 1024 is off by roundings of 2^-14 at most, to which distances are blind.
    exact_grads = gradients(exact, doubles)
    for out in (expected, got):
        assert_close(out.double(), exact, atol=tolerance * v.abs().sum(-2).max().item(), rtol=0)
        for a, b in zip(gradients(out, inputs), exact_grads, strict=True):
            assert_close(a.double(), b, atol=grad_tolerance * q.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("b", "n", "m"), [(0, 3, 5), (2, 0, 5), (2, 3, 0), (2, 1, 1)])
@pytest.mark.parametrize("n_iters", [1, 3])
def test_small_and_empty(b, n, m, n_iters):
    q, k, v = tokens(b, 2, n=n, m=m)
    out = sinkhorn_attention(q, k, v, n_iters=n_iters)
    assert out.shape == (b, 2, n, 7)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(out, (q, k, v)))


def test_leading_axes_broadcast():
    q, k, v = torch.randn(3, 1, 5, 4), torch.randn(2, 7, 4), torch.randn(1, 2, 7, 6)
    expected = sinkhorn_attention(q.expand(3, 2, 5, 4), k.expand(3, 2, 7, 4), v.expand(3, 2, 7, 6))
    assert_close(sinkhorn_attention(q, k, v), expected)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}, {"tau": 0.5}, {"gradient": "implicit"}])
def test_iterations_save_vectors_only(options):
    q, k, v = tokens(2, 3, n=131, m=137, d=16, e=16, dtype=torch.float32)
    few, many = (saved_bytes(lambda: sinkhorn_attention(q, k, v, n_iters=i, **options)) for i in (3, 21))  # noqa: B023
    vectors = (21 - 3) // 2 * (131 + 137) * 6 * 4
    tokens_bytes = q.nbytes + k.nbytes + v.nbytes + q.nbytes  # the last for the output, as wide as the queries
    assert few < tokens_bytes + 4 * (131 + 137) * 6 * 4  # nothing of size n × m
    assert many <= 1.1 * (few + vectors)


@pytest.mark.parametrize("options", [{"key_mask": torch.arange(137) < 100}, {"cost": "l2"}])
def test_softmax_attention_saves_no_matrix_for_a_mask_over_keys(options):
    q, k, v = tokens(2, 3, n=131, m=137, d=16, e=16, dtype=torch.float32)
    mask = torch.arange(131) < 90
    both = {**options, "query_mask": mask} if "key_mask" in options else options
    saved = saved_bytes(lambda: sinkhorn_attention(q, k, v, n_iters=1, **both))
    assert saved < 3 * (q.nbytes + k.nbytes + v.nbytes)


@pytest.mark.parametrize("options", [{"n_iters": 1}, {"n_iters": 7, "tau": 0.0}])
def test_softmax_attention_drops_as_torch_does(options):
    q, k, v = tokens(2, 3, n=13, m=17, d=16, e=16)
    found = []
    for call in (partial(sinkhorn_attention, **options), F.scaled_dot_product_attention):
        torch.manual_seed(0)
        found.append(call(q, k, v, dropout_p=0.3))
    assert_close(*found)
