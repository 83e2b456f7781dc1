"""Masking equals deletion, packing equals separate documents, and what is masked may hold anything."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.causal_cases import BACKENDS, MASKS, K, N, Q, attend, causal_gradients, tokens

REAL = {"left": torch.arange(N) >= 4, "right": torch.arange(N) < 9, "both": (torch.arange(N) - 6).abs() < 4}
FILLINGS = [0.0, math.nan, math.inf, 1e30]


def filled(tensors, real, filling):
    return [x.detach().masked_fill(~real[:, None], filling).requires_grad_() for x in tensors]


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("side", REAL)
@pytest.mark.parametrize("way", ["tokens", "keys alone", "matrix", "bias"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masking_equals_deletion(backend, way, side, filling):
    """On either side, whatever the padding holds: outputs and gradients. Padding on the left sees no key at all."""
    real, triangle = REAL[side], MASKS["triangle"]
    given = tokens(triangle, 2)
    whole, alone = filled(given, real, filling), [x.detach()[:, real].requires_grad_() for x in given]
    if way == "keys alone" and side != "left":
        pytest.skip("a query after the padding sees the keys before it")
    options = {
        "tokens": {"is_causal": True, "query_mask": real.expand(2, N), "key_mask": real.expand(2, N)},
        "keys alone": {"is_causal": True, "key_mask": real.expand(2, N)},
        "matrix": {"attn_mask": triangle & real & real[:, None]},
        "bias": {"attn_mask": torch.zeros(N, N).masked_fill(~(triangle & real & real[:, None]), -math.inf)},
    }[way]
    out = attend(*whole, n_iters=5, backend=backend, **options)
    expected = attend(*alone, is_causal=True, n_iters=5, backend=backend)
    assert_close(out[:, real], expected, atol=1e-13, rtol=0)
    assert not out[:, ~real].any()
    d_out = torch.randn_like(out)
    incoming = d_out.masked_fill(~real[:, None], filling)
    for got, exact in zip(
        causal_gradients(out, whole, d_out=incoming),
        causal_gradients(expected, alone, d_out=d_out[:, real]),
        strict=True,
    ):
        assert_close(got[:, real], exact, atol=1e-12, rtol=0)
        assert not got[:, ~real].any()


@pytest.mark.parametrize("n_iters", [3, 7])
@pytest.mark.parametrize("definition", ["streaming", "prefix"])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_packing_equals_separate_documents(backend, definition, n_iters):
    """Even where another document has far larger scores."""
    given, out = tokens(MASKS["packed documents"], 2), []
    with torch.no_grad():
        for x in given[:2]:
            x[:, 4:9] *= 20
    packed = attend(*given, MASKS["packed documents"], n_iters=n_iters, causal=definition, backend=backend)
    for part in (slice(0, 4), slice(4, 9), slice(9, N)):
        one = [x[:, part] for x in given]
        out.append(attend(*one, is_causal=True, n_iters=n_iters, causal=definition, backend=backend))
    assert_close(packed, torch.cat(out, 1), atol=1e-12, rtol=0)
    got, exact = causal_gradients(packed, given), causal_gradients(torch.cat(out, 1), given)
    for a, b in zip(got, exact, strict=True):
        assert_close(a, b, atol=1e-11 * max(1.0, b.abs().max().item()), rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_as_wide_as_the_text_is_the_triangle(backend):
    given = tokens(MASKS["triangle"], 2)
    wide = (K <= Q) & (Q - K < N)
    assert_close(
        attend(*given, wide, backend=backend), attend(*given, is_causal=True, backend=backend), atol=1e-14, rtol=0
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lowest_finite_number_is_a_mask(backend):
    """As Hugging Face writes it; column steps would divide it away otherwise."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = tokens(MASKS["triangle"], 2, dtype=dtype)
        bias = torch.zeros(N, N, dtype=dtype).masked_fill(~MASKS["triangle"], torch.finfo(dtype).min)
        expected = attend(*given, is_causal=True, backend=backend)
        # Both come from float32, and are rounded once.
        bound = torch.finfo(dtype).eps * max(1.0, given[2].abs().max().item()) + 4 * 2 * N * 1.2e-7
        assert_close(attend(*given, bias, backend=backend), expected, atol=bound, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_per_sample_and_per_head(backend):
    """Matrices (batch, heads, n, m), (batch, 1, n, m) and (n, m) with token masks (batch, n), as one boolean matrix."""
    given = tokens(MASKS["triangle"], 3, 2)
    real = torch.arange(N) >= torch.tensor([[0], [3], [5]])
    heads = torch.stack([MASKS["triangle"], MASKS["window"]])
    full = heads & real[:, None, None, :] & real[:, None, :, None]
    expected = torch.stack(
        [
            torch.stack([attend(*(x[b, h] for x in given), full[b, h], backend="reference") for h in range(2)])
            for b in range(3)
        ]
    )
    options = {"query_mask": real, "key_mask": real, "backend": backend}
    assert_close(attend(*given, full, backend=backend), expected, atol=1e-13, rtol=0)
    assert_close(attend(*given, heads, **options), expected, atol=1e-13, rtol=0)
    assert_close(attend(*given, heads.expand(3, 2, N, N), **options), expected, atol=1e-13, rtol=0)
