"""Generation with a cache: in chunks, token by token and in one pass, which all agree."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers import SinkhornCache, backend_for, sinkhorn_attention
from sinkformers.attention.causal import ColumnSums
from tests.causal_cases import BACKENDS, MASKS, N_ITERS, N, attend, tokens

CHUNKS = {
    "one by one": [1] * N,
    "a prompt, then tokens": [9, 1, 1, 1, 1],
    "two": [6, 7],
    "with an empty one": [0, 5, 0, 8],
}
STREAMING = [name for name in BACKENDS if name != "reference"]
CLOSE = {"atol": 1e-13, "rtol": 0}


def in_chunks(layer, given, sizes, masks=None, **fixed):
    """The outputs of consecutive chunks; `masks` gives those of queries start:stop and keys up to stop."""
    out, start = [], 0
    for size in sizes:
        stop = start + size
        parts = [x[..., start:stop, :] for x in given]
        out.append(attend(*parts, cache=layer, **({} if masks is None else masks(start, stop)), **fixed))
        start = stop
    return torch.cat(out, -2)


@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("backend", ["auto", *STREAMING])
def test_chunks_are_one_pass(backend, chunks, n_iters):
    given, cache = tokens(MASKS["triangle"], 2, 3), SinkhornCache()
    options = {"is_causal": True, "n_iters": n_iters, "tau": 0.8, "backend": backend}
    whole = attend(*given, **options)
    parts = in_chunks(cache[0], given, CHUNKS[chunks], **options)
    assert_close(parts, whole, **CLOSE)
    assert len(cache[0]) == N


@pytest.mark.parametrize("name", ["triangle", "padded left", "padded right", "window", "packed documents", "prefix-LM"])
@pytest.mark.parametrize("backend", STREAMING)
def test_chunks_under_masks(backend, name):
    """Of a mask a chunk has its rows, and the keys up to its end; a prefix that looks ahead is one chunk."""
    mask, given = MASKS[name], tokens(MASKS[name], 2)
    sizes = [5, 1, 1, 3, 3] if name == "prefix-LM" else [1, 4, 1, 1, 6]
    whole = attend(*given, mask, n_iters=5, backend=backend)
    rows = lambda start, stop: {"attn_mask": mask[start:stop, :stop]}  # noqa: E731
    assert_close(in_chunks(SinkhornCache()[0], given, sizes, rows, n_iters=5, backend=backend), whole, **CLOSE)


@pytest.mark.parametrize("name", ["triangle", "window", "more keys", "cross-attention"])
@pytest.mark.parametrize("backend", STREAMING)
def test_column_sums_alone_continue_keys_that_are_kept_elsewhere(backend, name):
    """Every call has all keys so far; those of cross-attention are the same from the first call on."""
    mask, (query, key, value) = MASKS[name], tokens(MASKS[name], 2, 3)
    n, m = mask.shape
    whole = attend(query, key, value, mask, n_iters=5, backend=backend)
    sums, parts, is_cross = ColumnSums(grows=name != "cross-attention"), [], name == "cross-attention"
    for start, stop in ((0, 3), (3, 4), (4, n)):
        seen = m if is_cross else m - n + stop
        given = (query[..., start:stop, :], key[..., :seen, :], value[..., :seen, :])
        options = {"is_causal": True} if name == "triangle" else {"attn_mask": mask[start:stop, :seen]}
        parts.append(attend(*given, **options, n_iters=5, backend=backend, cache=sums))
        assert len(sums) == seen
        assert sums.key is None
    assert_close(torch.cat(parts, -2), whole, **CLOSE)
    with pytest.raises(ValueError, match=rf"column sums of {m} keys, which {m - 1} keys do not continue"):
        attend(query[..., :1, :], key[..., 1:, :], value[..., 1:, :], n_iters=5, backend=backend, cache=sums)


@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("backend", STREAMING)
def test_a_batch_with_left_padding(backend, cost):
    """Key masks grow with the keys; each sample is as if it were alone."""
    given, cache = tokens(MASKS["triangle"], 3, 2), SinkhornCache()
    real = torch.arange(N) >= torch.tensor([[0], [3], [6]])
    with torch.no_grad():
        for x in given:
            x.masked_fill_(~real[:, None, :, None], math.nan)
    masks = lambda start, stop: {"query_mask": real[:, start:stop], "key_mask": real[:, :stop]}  # noqa: E731
    parts = in_chunks(cache[0], given, [7, 1, 1, 4], masks, is_causal=True, cost=cost, backend=backend)
    for sample, length in enumerate([13, 10, 7]):
        alone = [x[sample, :, N - length :] for x in given]
        exact = attend(*alone, is_causal=True, cost=cost, backend=backend)
        assert_close(parts[sample, :, N - length :], exact, **CLOSE)
        assert not parts[sample, :, : N - length].any()


@pytest.mark.parametrize("backend", STREAMING)
def test_grouped_heads(backend):
    """Keys and values are cached once per group, sums per query head."""
    query, key, value = torch.randn(2, 6, N, 5), torch.randn(2, 3, N, 5), torch.randn(2, 3, N, 4)
    options, cache = {"is_causal": True, "enable_gqa": True, "backend": backend}, SinkhornCache()
    whole = attend(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), is_causal=True, backend=backend)
    parts = in_chunks(cache[0], (query, key, value), [8, 1, 4], **options)
    assert_close(parts, whole, atol=1e-5, rtol=0)
    assert cache[0].key.shape == (2, 3, N, 5)
    assert cache[0].received.shape == (2, 6, 1, N)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", STREAMING)
def test_cross_attention_keeps_its_sums(backend, padded):
    """Every call has all keys. The layer of the cache holds what they have received."""
    query, key, value = tokens(MASKS["cross-attention"], 2, 3)
    masks = {"key_mask": torch.arange(7) < torch.tensor([[5], [7]])} if padded else {}
    layer, out, start = SinkhornCache().cross(0), [], 0
    whole = attend(query, key, value, n_iters=5, backend=backend, **masks)
    for size in (1, 4, 0, 1, 7):
        part = query[:, :, start : start + size]
        out.append(attend(part, key, value, n_iters=5, cache=layer, backend=backend, **masks))
        start += size
    assert_close(torch.cat(out, -2), whole, **CLOSE)
    assert len(layer) == 7


def test_reordering_takes_the_sums_along():
    """As beam search does: each sample continues from the one that it was taken from, in all layers."""
    given, other = tokens(MASKS["triangle"], 3, 2), tokens(MASKS["cross-attention"], 3, 2)
    cache, index = SinkhornCache(), torch.tensor([2, 0, 0])
    in_chunks(cache[0], [x[:, :, :6] for x in given], [4, 2], is_causal=True)
    attend(other[0][:, :, :6], *other[1:], cache=cache.cross(0))
    cache.reorder(index)
    past, future = [x[index, :, :6] for x in given], [x[:, :, 6:] for x in given]
    whole = attend(*(torch.cat(both, 2) for both in zip(past, future, strict=True)), is_causal=True)
    assert_close(attend(*future, is_causal=True, cache=cache[0]), whole[:, :, 6:], **CLOSE)
    query = torch.cat([other[0][index, :, :6], other[0][:, :, 6:]], 2)
    whole = attend(query, other[1][index], other[2][index])
    part = attend(other[0][:, :, 6:], other[1][index], other[2][index], cache=cache.cross(0))
    assert_close(part, whole[:, :, 6:], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_kept_in_float32(dtype):
    given, cache = tokens(MASKS["triangle"], 2, dtype=dtype), SinkhornCache()
    whole = attend(*given, is_causal=True)
    parts = in_chunks(cache[0], given, [1] * N, is_causal=True)
    assert cache[0].key.dtype == dtype
    assert cache[0].received.dtype == cache[0].expected.dtype == torch.float32
    # The output is rounded to its dtype, from numbers that agree to that of float32.
    assert_close(parts.float(), whole.float(), atol=4 * torch.finfo(dtype).eps * 4, rtol=0)


@pytest.mark.parametrize("n_iters", [1, 3])
def test_the_cache_holds_copies(n_iters):
    """Buffers that are written to again change nothing of the past."""
    given, cache = [x.detach() for x in tokens(MASKS["triangle"], 2)], SinkhornCache()
    whole, out, buffers = attend(*given, is_causal=True, n_iters=n_iters), [], [x[:, :1].clone() for x in given]
    for i in range(N):
        for buffer, x in zip(buffers, given, strict=True):
            buffer.copy_(x[:, i : i + 1])
        out.append(attend(*buffers, is_causal=True, n_iters=n_iters, cache=cache[0]))
    assert_close(torch.cat(out, 1), whole, **CLOSE)


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    given, cache = tokens(MASKS["triangle"], 2), SinkhornCache()
    attend(*(x[:, :5] for x in given), is_causal=True, cache=cache[0])
    before = cache[0].key, cache[0].received
    for wrong in ({"tau": 7.0}, {"key_mask": torch.ones(2, 4, dtype=torch.bool)}, {"backend": "reference"}):
        with pytest.raises((ValueError, NotImplementedError)):
            sinkhorn_attention(*(x[:, 5:] for x in given), is_causal=True, cache=cache[0], **wrong)
    assert backend_for(*(x[:, 5:] for x in given), is_causal=True, cache=cache[0]) in BACKENDS
    assert cache[0].key is before[0]
    assert cache[0].received is before[1]


def test_gradients_reach_this_chunk_and_not_the_cache():
    given, cache = tokens(MASKS["triangle"], 2), SinkhornCache()
    first, second = [x[:, :5] for x in given], [x[:, 5:] for x in given]
    attend(*first, is_causal=True, cache=cache[0])
    assert not cache[0].received.requires_grad
    attend(*second, is_causal=True, cache=cache[0]).square().sum().backward()
    for x in given:
        assert not x.grad[:, :5].any()
        assert x.grad[:, 5:].isfinite().all()
    query, key, value = (x.detach()[:, 5:].requires_grad_() for x in given)

    def again(query, key, value):
        fresh = SinkhornCache()
        attend(*(x.detach() for x in first), is_causal=True, cache=fresh[0])
        return attend(query, key, value, is_causal=True, tau=1.0, cache=fresh[0])

    assert torch.autograd.gradcheck(again, (query, key, value), fast_mode=True, nondet_tol=1e-12)


def test_layers_and_representation():
    cache, given = SinkhornCache(), tokens(MASKS["triangle"], 2)
    assert cache
    assert cache[1]
    assert len(cache) == 2
    assert cache[1] is cache[1]
    assert list(cache) == [cache[0], cache[1]]
    assert cache.cross(0) is not cache[0]
    attend(*given, is_causal=True, cache=cache[0])
    assert repr(cache) == "SinkhornCache(2 layers, 13 tokens)"
    assert repr(cache[0]) == "CacheLayer(13 tokens)"
    cache.reset()
    assert len(cache) == 0
    assert len(cache[0]) == 0


def test_reordering_takes_what_masks_made_of_each_sample_along():
    cache, index, valid = SinkhornCache(), torch.tensor([2, 0, 0]), torch.arange(13) >= torch.tensor([[0], [2], [5]])
    attend(*tokens(MASKS["triangle"], 3, 2), is_causal=True, key_mask=valid[:, None], cache=cache[0])
    before = cache[0].expected.clone()
    cache.reorder(index)
    assert cache[0].expected.equal(before[index])
    assert not before[index].equal(before)


@pytest.mark.parametrize("n_iters", [1, 3])
def test_softmax_by_tau_goes_on_after_empty_chunks(n_iters):
    query, key, value = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 3)
    layer, options = SinkhornCache().cross(0), {"n_iters": n_iters, "tau": 0.0, "causal": "streaming"}
    chunks = [query[:, start:stop] for start, stop in ((0, 0), (0, 3), (3, 3), (3, 5), (5, 5))]
    out = torch.cat([sinkhorn_attention(chunk, key, value, cache=layer, **options) for chunk in chunks], -2)
    assert_close(out, torch.nn.functional.scaled_dot_product_attention(query, key, value))
