"""Where Sinkhorn attention is SoftMax attention, by one normalisation or tau 0; and what counts as masked there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from sinkformers import MultiheadAttention, sinkhorn_attention, to_sinkformer
from tests import oracle

BACKENDS = ["auto", "torch", "native", "reference"]


def tokens(*lead, n=11, m=13, d=16, e=5, dtype=torch.float64):
    shapes = ((*lead, n, d), (*lead, m, d), (*lead, m, e))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def results(out, inputs):
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, inputs, d_out.to(out.dtype))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_half_precision_distances_are_as_exact_as_their_tokens(backend, dtype, padded):
    """The squares |q|² and |k|² are larger than the distance they make up; only results are rounded to half precision.

    Tokens of std 4 and 16 features have squares of about 256, which bfloat16 would round to 1, and float16 to 1/8.
    """
    query, key, value = tokens(2, 3, dtype=dtype)
    inputs = [x.detach().requires_grad_() for x in (4 * query, 4 * key, value)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    scale, real = 0.05, torch.arange(13) < 9
    mask = {"key_mask": real} if padded else {}
    got = sinkhorn_attention(*inputs, n_iters=1, cost="l2", scale=scale, backend=backend, **mask)
    exact = oracle.attention(*doubles, 1, cost="l2", scale=scale, mask=real if padded else None)
    ours, theirs = results(got, inputs), results(exact, doubles)
    # Float32 within: d roundings of terms as large as the squares, in scores that the weights follow one to one.
    squares = scale * max(x.detach().double().square().sum(-1).max().item() for x in inputs[:2])
    within = 16 * torch.finfo(torch.float32).eps * squares * value.abs().max().item()
    rounding = torch.finfo(dtype).eps
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        # Gradients of queries and keys multiply by scale·|token|, and sum 13 weights' errors.
        reach = 13 * scale * 16 if place in (1, 2) else 13
        # The incoming gradient is rounded to half precision too, in the library only.
        d_rounding = rounding * b.abs().max().item() * 4 if place else 0.0
        assert_close(a.double(), b, atol=reach * within + d_rounding, rtol=rounding)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [1, 3, 4, 21])
@pytest.mark.parametrize("share", [0.51, 0.6, 1.0])
def test_a_bias_below_half_of_the_lowest_number_masks(backend, dtype, n_iters, share):
    """Two of them add up beyond it, as where a padding mask was added to another."""
    inputs = tokens(2, 3, d=4, dtype=dtype)
    keep = torch.rand(2, 1, 11, 13) > 0.3
    keep[:, :, 2], keep[..., 5] = False, False
    bias = torch.zeros(2, 1, 11, 13, dtype=dtype).masked_fill(~keep, share * torch.finfo(dtype).min)
    options = {"n_iters": n_iters, "backend": backend}
    masked = results(sinkhorn_attention(*inputs, keep, **options), inputs)
    biased = results(sinkhorn_attention(*inputs, bias, **options), inputs)
    for a, b in zip(biased, masked, strict=True):
        assert a.equal(b) or backend == "auto"  # there torch's function takes booleans and biases by different kernels
        assert_close(a, b)
    assert biased[0][:, :, 2].eq(0).all()
    assert biased[2][:, :, 5].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [1, 5])
def test_the_lowest_number_is_that_of_the_bias_not_of_the_tokens(backend, dtype, bias_dtype, n_iters):
    inputs = tokens(2, 3, d=4, dtype=dtype)
    keep = torch.rand(2, 1, 1, 13) > 0.3
    bias = torch.zeros(2, 1, 1, 13, dtype=bias_dtype).masked_fill(~keep, 0.6 * torch.finfo(bias_dtype).min)
    options = {"n_iters": n_iters, "backend": backend}
    got = sinkhorn_attention(*inputs, bias, **options)
    assert_close(got, sinkhorn_attention(*inputs, keep, **options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_bias_above_half_of_the_lowest_number_does_not_mask(backend, dtype):
    """A column step lifts a key that lies low for every query, however low; values of one feature a key show it."""
    query, key, _ = tokens(2, 3, d=4, dtype=dtype)
    value = torch.eye(13, dtype=dtype).expand(2, 3, 13, 13)
    bias = torch.zeros(13, dtype=dtype)
    bias[5] = 0.4 * torch.finfo(dtype).min
    low, level = (sinkhorn_attention(query, key, value, b, n_iters=3, backend=backend) for b in (bias, 0 * bias))
    # Scores beside such a bias are lost to rounding, so that the column is uniform; but it is there.
    assert low[..., 5].min() > 0.1 * level[..., 5].min()


def triangle(n, m):
    return torch.ones(n, m, dtype=torch.bool).tril()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["is_causal", "boolean", "bias"])
@pytest.mark.parametrize("options", [{"n_iters": 3, "tau": 0.0}, {"n_iters": 4, "tau": 0}, {"n_iters": 1}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_mask_under_softmax(backend, way, options, padded):
    """At tau 0 no column is normalised, so nothing leaks: earlier outputs are SoftMax attention's own."""
    inputs = tokens(2, 3, n=13)
    keep = triangle(13, 13)
    real = torch.arange(13) != 4
    named = {
        "is_causal": {"is_causal": True},
        "boolean": {"attn_mask": keep},
        "bias": {"attn_mask": torch.zeros(13, 13, dtype=torch.float64).masked_fill(~keep, -torch.inf)},
    }[way]
    got = sinkhorn_attention(*inputs, backend=backend, key_mask=real if padded else None, **named, **options)
    expected = F.scaled_dot_product_attention(*inputs, keep & real if padded else keep)
    for a, b in zip(results(got, inputs), results(expected, inputs), strict=True):
        assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_causal_mask_with_one_normalisation_and_a_tensor_tau(backend):
    """With one normalisation there is no column step for tau to relax."""
    inputs = tokens(2, 3, n=13)
    got = sinkhorn_attention(*inputs, is_causal=True, n_iters=1, tau=torch.tensor(0.5), backend=backend)
    assert_close(got, F.scaled_dot_product_attention(*inputs, is_causal=True), atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", [{"n_iters": 3, "tau": 0.0}, {"n_iters": 1, "tau": 1.0}], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("hint", [False, True])
def test_a_causal_mask_in_modules_at_tau_zero(options, need_weights, hint):
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    ours = MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    call = {"attn_mask": ~triangle(7, 7), "is_causal": hint, "need_weights": need_weights}
    converted = to_sinkformer(nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64), **options)
    converted.load_state_dict(theirs.state_dict())
    expected, weights = theirs(x, x, x, **call)
    for layer in (ours, converted):
        out, seen = layer(x, x, x, **call)
        assert_close(out, expected, atol=1e-12, rtol=0)
        assert (seen is None) == (weights is None)
        if weights is not None:
            assert_close(seen, weights, atol=1e-12, rtol=0)


def test_a_causal_mask_in_a_converted_encoder_at_tau_zero():
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    expected = encoder(x, mask)
    out = to_sinkformer(encoder, 3, tau=0.0)(x, mask)
    assert_close(out, expected, atol=1e-12, rtol=0)
    moved = x.clone()
    moved[:, -1] += 1
    assert_close(encoder(moved, mask)[:, :-1], out[:, :-1], atol=1e-12, rtol=0)
