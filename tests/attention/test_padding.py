"""Masked tokens have no effect, by whichever mask."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from tests import oracle

BACKENDS = ["auto", "torch", "native", "reference"]
N_ITERS = [1, 2, 3, 21]


def tokens(n=11, m=13, d=5, e=3, dtype=torch.float32):
    shapes = ((2, 3, n, d), (2, 3, m, d), (2, 3, m, e))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def run(attend, inputs, d_out):
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, d_out)


@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("pad", [1, 50])
def test_padding_of_any_length_equals_none(pad, n_iters, backend, cost):
    short = tokens(dtype=torch.float64)
    padded = [torch.cat([x, torch.full((2, 3, pad, x.shape[-1]), torch.nan)], 2).detach() for x in short]
    padded = [x.requires_grad_() for x in padded]
    real_q, real_k = (torch.arange(n + pad).expand(2, -1) < n for n in (11, 13))
    d_out = torch.randn(2, 3, 11, 3, dtype=torch.float64)
    d_padded = torch.cat([d_out, torch.full((2, 3, pad, 3), torch.inf)], 2)
    options = {"n_iters": n_iters, "backend": backend, "cost": cost}
    expected = run(lambda *x: sinkhorn_attention(*x, **options), short, d_out)
    got = run(lambda *x: sinkhorn_attention(*x, query_mask=real_q, key_mask=real_k, **options), padded, d_padded)
    for a, b in zip(got, expected, strict=True):
        kept = b.shape[-2]
        assert_close(a[..., :kept, :], b, atol=1e-12, rtol=0)
        assert a[..., kept:, :].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("way", ["token masks", "attn_mask", "bias", "lowest bias", "key mask only", "scattered"])
def test_what_stands_in_the_padding_changes_no_bit(n_iters, backend, way):
    real_q, real_k = torch.rand(2, 11) > 0.3, torch.rand(2, 13) > 0.3
    both = (real_q[:, None, :, None] & real_k[:, None, None, :]).expand(2, 3, 11, 13)
    if way == "scattered":
        both = both & (torch.rand(2, 3, 11, 13) > 0.3)
    bias = torch.randn(2, 3, 11, 13)
    options = {
        "token masks": {"query_mask": real_q, "key_mask": real_k},
        "attn_mask": {"attn_mask": both},
        "scattered": {"attn_mask": both},
        "bias": {"attn_mask": bias.masked_fill(~both, -torch.inf)},
        "lowest bias": {"attn_mask": bias.masked_fill(~both, torch.finfo(bias.dtype).min)},
        "key mask only": {"key_mask": real_k},
    }[way]
    rows = torch.ones(2, 3, 11, dtype=torch.bool) if way == "key mask only" else both.any(-1)
    cols = real_k[:, None].expand(2, 3, 13) if way == "key mask only" else both.any(-2)
    results = []
    for filling in (0.0, 1e20, torch.nan, torch.inf):
        torch.manual_seed(1)
        alive = (rows, cols, cols)
        inputs = [
            x.detach().masked_fill(~a[..., None], filling).requires_grad_()
            for x, a in zip(tokens(), alive, strict=True)
        ]
        d_out = torch.randn(2, 3, 11, 3).masked_fill(~rows[..., None], filling)
        results.append(
            run(lambda *x: sinkhorn_attention(*x, n_iters=n_iters, backend=backend, **options), inputs, d_out)
        )
    for result in results:
        for a, b, alive in zip(result, results[0], (rows, rows, cols, cols), strict=True):
            assert a.equal(b)
            assert a.isfinite().all()
            assert a[~alive].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", ["min", "min/2", "-inf"])
@pytest.mark.parametrize("n_iters", [1, 3, 21])
def test_the_lowest_number_is_a_mask(dtype, value, n_iters):
    q, k, v = (x.detach().to(dtype) for x in tokens())
    keep = torch.rand(2, 1, 1, 13) > 0.4
    lowest = {"min": torch.finfo(dtype).min, "min/2": torch.finfo(dtype).min / 2, "-inf": -torch.inf}[value]
    bias = torch.zeros(2, 1, 1, 13, dtype=dtype).masked_fill(~keep, lowest)
    expected = sinkhorn_attention(q, k, v, keep, n_iters=n_iters)
    assert_close(sinkhorn_attention(q, k, v, bias, n_iters=n_iters), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masking_a_key_alone_is_not_padding(backend):
    """The padded queries then stay in the column sums; the oracle says the same."""
    q, k, v = tokens(n=13, dtype=torch.float64)
    keep = torch.arange(13) < 6
    got = sinkhorn_attention(q, k, v, key_mask=keep.expand(2, -1), n_iters=5, backend=backend)
    exact = oracle.attention(q, k, v, 5, mask=keep)
    assert_close(got, exact, atol=1e-12, rtol=0)
    both = sinkhorn_attention(q, k, v, query_mask=keep, key_mask=keep, n_iters=5, backend=backend)
    assert (got - both)[:, :, :6].abs().max() > 1e-3


@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_of_nothing_but_padding_gives_zeros(n_iters, backend):
    inputs = tokens()
    real = torch.stack([torch.zeros(13, dtype=torch.bool), torch.ones(13, dtype=torch.bool)])
    out, *grads = run(
        lambda *x: sinkhorn_attention(*x, key_mask=real, n_iters=n_iters, backend=backend),
        inputs,
        torch.full((2, 3, 11, 3), torch.nan).index_fill(0, torch.tensor([1]), 1.0),
    )
    for a in (out, *grads):
        assert a[0].eq(0).all()
        assert a[1].isfinite().all()


def test_token_masks_of_every_rank():
    q, k, v = (x.detach() for x in tokens())
    mask = torch.rand(2, 13) > 0.3
    expected = sinkhorn_attention(q, k, v, key_mask=mask)
    assert sinkhorn_attention(q, k, v, key_mask=mask[:, None]).equal(expected)
    assert sinkhorn_attention(q, k, v, key_mask=mask[:, None].expand(2, 3, 13)).equal(expected)
    assert_close(sinkhorn_attention(q[0], k[0], v[0], key_mask=mask[0]), expected[0])
    assert_close(sinkhorn_attention(q[:, 0], k[:, 0], v[:, 0], key_mask=mask), expected[:, 0])
    assert_close(sinkhorn_attention(q[0, 0], k[0, 0], v[0, 0], key_mask=mask[0]), expected[0, 0])


def test_a_token_mask_with_fewer_axes_has_the_first_of_the_tokens():
    """Two equal batch axes would also fit from the right."""
    q, k, v = (torch.randn(2, 2, 3, n, 5) for n in (11, 13, 13))
    mask = torch.rand(2, 13) > 0.3
    expected = sinkhorn_attention(q, k, v, mask[:, None, None, None, :])
    assert_close(sinkhorn_attention(q, k, v, key_mask=mask), expected)
    mask = torch.rand(2, 2, 13) > 0.3
    expected = sinkhorn_attention(q, k, v, mask[:, :, None, None, :])
    assert_close(sinkhorn_attention(q, k, v, key_mask=mask), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padded", [False, True])
def test_keys_after_the_last_query_are_not_seen_by_causal_softmax(backend, padded):
    q, k, v = tokens(n=5, m=9)
    real = torch.arange(9).expand(2, -1) != 2
    options = {"n_iters": 1, "is_causal": True, "backend": backend}
    expected = sinkhorn_attention(q, k, v, key_mask=real if padded else None, **options)
    late = (torch.arange(9) >= 5)[:, None]
    inputs = [q, *(x.detach().masked_fill(late, torch.nan).requires_grad_() for x in (k, v))]
    got = sinkhorn_attention(*inputs, key_mask=real if padded else None, **options)
    assert got.equal(expected)
    for grad in torch.autograd.grad(got.sum(), inputs):
        assert grad.isfinite().all()
        assert grad[:, :, 5:].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("where", ["query", "key", "value", "d_out"])
def test_a_nan_in_the_game_gives_no_gradient_to_padding(where, n_iters, backend):
    """NaN in a valid token comes out again, but not at masked tokens."""
    real_q, real_k = (torch.arange(n) < n - 3 for n in (11, 13))
    bias = torch.randn(2, 3, 11, 13).requires_grad_()
    inputs = [x.detach() for x in tokens()]
    d_out = torch.randn(2, 3, 11, 3)
    dict(zip(("query", "key", "value", "d_out"), (*inputs, d_out), strict=True))[where][0, 1, 2, 1] = torch.nan
    inputs = [x.requires_grad_() for x in inputs]
    out = sinkhorn_attention(*inputs, bias, query_mask=real_q, key_mask=real_k, n_iters=n_iters, backend=backend)
    grads = torch.autograd.grad(out, (*inputs, bias), d_out)
    assert any(grad.isnan().any() for grad in grads)
    for grad, real in zip((out, *grads[:3]), (real_q, real_q, real_k, real_k), strict=True):
        assert grad[:, :, ~real].eq(0).all()
        assert grad[1].isfinite().all()
    assert grads[3][..., ~(real_q[:, None] & real_k)].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_iters", N_ITERS)
def test_a_nan_bias_at_padding_changes_no_bit(n_iters, backend):
    real_q, real_k = (torch.arange(n) < n - 3 for n in (11, 13))
    masks = {"query_mask": real_q, "key_mask": real_k, "n_iters": n_iters, "backend": backend}
    results, inputs, clean = [], tokens(), torch.randn(11, 13)
    for filling in (0.0, torch.nan):
        bias = clean.masked_fill(~(real_q[:, None] & real_k), filling).requires_grad_()
        out = sinkhorn_attention(*inputs, bias, **masks)
        results.append((out, *torch.autograd.grad(out.square().sum(), (*inputs, bias))))
    for a, b in zip(*results, strict=True):
        assert a.equal(b)
        assert a.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("offset", [1e5, -1e5])
def test_a_bias_may_be_wider_than_the_tokens(offset, n_iters, backend):
    """Every row may be shifted: 1e5 is beyond float16, and 1/128 is what float32 rounds it to."""
    q, k, v = (x.detach().half() for x in tokens())
    bias = (torch.randn(11, 13) * 128).round() / 128
    options = {"n_iters": n_iters, "backend": backend, "key_mask": torch.arange(13) < 10}
    got = sinkhorn_attention(q, k, v, bias + offset, **options)
    # Scores beside 1e5 are rounded to 1/256, and so are the weights; the output to its own dtype.
    assert_close(
        got, sinkhorn_attention(q, k, v, bias, **options), atol=v.abs().max().item() * (2 / 256 + 1e-3), rtol=0
    )
