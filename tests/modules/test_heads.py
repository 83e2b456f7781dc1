"""The arguments that our attention modules pass to attention: `tau`, scale, dropout in training, masks."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from sinkformers.modules import MAB, SelfAttention
from sinkformers.modules.heads import join_heads, split_heads
from tests.rounding import rounding

EXACT = rounding(4096)  # a few small layers in float64, with sums of up to some ten products: 9e-13


@pytest.mark.parametrize("tau", [0.0, 0.4, 1.0])
def test_self_attention_is_attention_between_its_projections(tau):
    layer = SelfAttention(12, 3, n_iters=5, tau=tau).double()
    x, mask = torch.randn(2, 7, 12).double(), torch.arange(7) < torch.tensor([[7], [4]])
    heads = (split_heads(each, 3) for each in layer.project(x).chunk(3, -1))
    attended = sinkhorn_attention(*heads, n_iters=5, tau=tau, query_mask=mask, key_mask=mask)
    assert_close(layer(x, mask), layer.out(join_heads(attended)), **EXACT)


@pytest.mark.parametrize("tau", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("scale_by", ["head", "width"])
def test_a_block_is_attention_between_its_projections(tau, scale_by):
    layer = MAB(5, 3, 8, 2, n_iters=5, tau=tau, norm=False, scale_by=scale_by).double()
    x, y = torch.randn(2, 7, 5).double(), torch.randn(2, 11, 3).double()
    query, key, value = (split_heads(each, 2) for each in (layer.query(x), layer.key(y), layer.value(y)))
    scale = {"head": 4, "width": 8}[scale_by] ** -0.5
    h = join_heads(query + sinkhorn_attention(query, key, value, scale=scale, n_iters=5, tau=tau))
    assert_close(layer(x, y), h + layer.out(h).relu(), **EXACT)


@pytest.mark.parametrize("n_iters", [1, 5])
def test_dropout_is_for_training_only(n_iters):
    """Where all weights are dropped, nothing but the bias of the output projection is left."""
    layer, x = SelfAttention(12, 3, n_iters=n_iters, dropout=1.0), torch.randn(2, 7, 12)
    assert layer(x).equal(layer.out.bias.expand(2, 7, 12))
    plain = SelfAttention(12, 3, n_iters=n_iters)
    plain.load_state_dict(layer.state_dict())
    assert layer.eval()(x).equal(plain(x))
