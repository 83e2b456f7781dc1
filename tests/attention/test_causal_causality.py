"""No output depends on a later position, shown by gradients: every backend, definition, mask and dtype."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from tests.causal_cases import BACKENDS, MASKS, SQUARE, attend, tokens

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def jacobians(out, inputs):
    """How each row of the output depends on each token: (rows, tokens) for each input, as largest gradients."""
    found = []
    for row in range(out.shape[-2]):
        d_out = torch.zeros_like(out)
        d_out[..., row, :] = torch.randn(out[..., row, :].shape).to(out.dtype)
        grads = torch.autograd.grad(out, inputs, d_out, retain_graph=True)
        found.append([grad.abs().amax(-1) for grad in grads])
    return [torch.stack(each) for each in zip(*found, strict=True)]


def check(found, queries, keys, values):
    """Exact zeros where nothing may depend, and somewhere else a dependence."""
    for got, allowed in zip(found, (queries, keys, values), strict=True):
        assert got.isfinite().all()
        assert not got[~allowed].any()
        assert got[allowed].count_nonzero() > allowed.sum() / 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_streaming(backend, name, dtype):
    """Queries up to this one count, and the keys that they see; values only where this query sees them."""
    mask = MASKS[name]
    query, key, value = tokens(mask, dtype=dtype)
    out = attend(query, key, value, mask, n_iters=5, backend=backend)
    seeing, seen = mask.any(-1), mask.cumsum(0).bool()
    order = torch.ones(len(mask), len(mask), dtype=torch.bool).tril() & seeing
    check(jacobians(out, (query, key, value)), order & seeing[:, None], seen & seeing[:, None], mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_triangle_by_name(backend, dtype):
    mask = MASKS["triangle"]
    query, key, value = tokens(mask, dtype=dtype)
    out = attend(query, key, value, is_causal=True, n_iters=5, backend=backend)
    check(jacobians(out, (query, key, value)), mask, mask, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SQUARE)
def test_prefix(name, dtype):
    """The tokens that a query sees count, and itself."""
    mask = MASKS[name]
    query, key, value = tokens(mask, dtype=dtype)
    out = attend(query, key, value, mask, causal="prefix", n_iters=5)
    itself = torch.eye(len(mask), dtype=torch.bool) & mask.any(-1)
    check(jacobians(out, (query, key, value)), (mask | itself) & mask.any(-1), mask, mask)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_later_blocks_change_nothing(backend):
    """Of 300 positions, a later one changes no bit of the rows before its block, and rounding at most in it."""
    query, key, value = (x.detach() for x in tokens(torch.ones(300, 300), 2, dtype=torch.float32))
    first = attend(query, key, value, is_causal=True, backend=backend)
    changed = [torch.cat([x[:, :290], torch.randn(2, 10, x.shape[-1])], 1) for x in (query, key, value)]
    again = attend(*changed, is_causal=True, backend=backend)
    bound = 4 * 600 * 1.2e-7 * value.abs().max().item()
    torch.testing.assert_close(again[:, :290], first[:, :290], atol=bound, rtol=0)
    assert again[:, :128].equal(first[:, :128])
    assert not again[:, 290:].allclose(first[:, 290:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("causal", ["streaming", "prefix"])
def test_a_later_query_or_key_that_is_not_finite_leaves_earlier_rows_alone(causal, which, bad):
    given = [x.detach() for x in tokens(MASKS["triangle"], 2)]
    whole = sinkhorn_attention(*given, is_causal=True, causal=causal)
    given[which] = given[which].clone()
    given[which][..., -1, :] = bad
    found = sinkhorn_attention(*given, is_causal=True, causal=causal)
    assert_close(found[..., :-1, :], whole[..., :-1, :], atol=1e-12, rtol=0)
