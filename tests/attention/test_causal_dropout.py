"""Dropout of causal attention: the same entries in every backend and block, and again in backward."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from tests.causal_cases import BACKENDS, MASKS, attend, tokens


def dropped(n, m, *lead, backend, seed=3, **options):
    """The weights after dropout, shown by values that are the identity."""
    torch.manual_seed(seed)
    query, key = torch.randn(*lead, n, 4), torch.randn(*lead, m, 4)
    torch.manual_seed(seed)
    return attend(query, key, torch.eye(m).expand(*lead, m, m), dropout_p=0.4, backend=backend, **options)


@pytest.mark.parametrize("n", [13, 150])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_backends_and_blocks_drop_the_same(backend, n):
    got = dropped(n, n, 2, 3, backend=backend, is_causal=True)
    plain = dropped(n, n, 2, 3, backend="torch", causal=None)  # plain attention has no blocks
    lower = torch.ones(n, n, dtype=torch.bool).tril()
    assert got.ne(0)[..., lower].equal(plain.ne(0)[..., lower])
    assert abs(got.ne(0)[..., lower].float().mean().item() - 0.6) < 4 * (0.24 / (6 * lower.sum().item())) ** 0.5


def test_prefix_drops_too():
    got = dropped(13, 13, 2, 3, backend="auto", is_causal=True, causal="prefix")
    lower = MASKS["triangle"]
    assert 0.5 < got.ne(0)[..., lower].float().mean().item() < 0.7


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_weights_are_scaled_and_backward_drops_the_same(backend):
    query, key, value = tokens(MASKS["window"], 2)
    bare = attend(query, key, torch.eye(13, dtype=torch.float64).expand(2, 13, 13), MASKS["window"], backend=backend)
    torch.manual_seed(1)
    shown = attend(
        query, key, torch.eye(13, dtype=torch.float64).expand(2, 13, 13), MASKS["window"], 0.4, backend=backend
    )
    torch.manual_seed(1)
    out = attend(query, key, value, MASKS["window"], 0.4, backend=backend)
    kept = shown != 0
    assert_close(shown[kept], bare[kept] / 0.6, atol=1e-13, rtol=0)
    assert_close(out, shown @ value, atol=1e-13, rtol=0)
    d_out = torch.randn_like(out)
    assert_close(torch.autograd.grad(out, value, d_out, retain_graph=True)[0], shown.mT @ d_out, atol=1e-12, rtol=0)

    def again(query, key):
        torch.manual_seed(1)
        return attend(query, key, value.detach(), MASKS["window"], 0.4, backend=backend)

    assert torch.autograd.gradcheck(again, (query, key), fast_mode=True, nondet_tol=1e-12)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_everything_dropped(backend):
    query, key, value = tokens(MASKS["triangle"], 2)
    out = attend(query, key, value, is_causal=True, dropout_p=1.0, backend=backend)
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), (query, key, value)):
        assert not grad.any()


def test_planning_draws_nothing():
    query, key, value = tokens(MASKS["triangle"], 2)
    state = torch.get_rng_state()
    sinkhorn_attention(query, key, value, is_causal=True)
    assert torch.get_rng_state().equal(state)
