"""Arguments of intercepted calls: dropout, scale, groups, padding in scores; and selection of modules by pattern."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_attention, to_sinkformer, watch_attention
from tests.rounding import rounding

EXACT = rounding(4096)  # a few small layers in float64, with sums of up to some ten products: 9e-13


class Attention(nn.Module):
    """Calls SDPA with the options it was built with."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value, mask=None):
        return F.scaled_dot_product_attention(query, key, value, mask, **self.options)


def heads(*counts, n=7):
    return [torch.randn(2, count, n, 4, dtype=torch.float64) for count in counts]


def test_a_pattern_must_match_the_whole_name():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 12)
    for pattern in ("layers.1", "layers.1.self", "1.self_attn", "LAYERS.1.self_attn"):
        with pytest.raises(ValueError, match="select matches none of the modules"):
            to_sinkformer(encoder, 3, select=pattern)
    to_sinkformer(encoder, 3, select="layers.1.self_attn")
    assert list(encoder.sinkformer_report.converted) == ["layers.1.self_attn"]


@pytest.mark.parametrize("n_iters", [1, 5])
def test_dropout_of_an_intercepted_call(n_iters):
    query, key, _ = heads(3, 3, 3)
    value = torch.eye(7, dtype=torch.float64).expand(2, 3, 7, 7)
    assert to_sinkformer(Attention(dropout_p=1.0), n_iters, adapter="sdpa")(query, key, value).eq(0).all()
    layer = to_sinkformer(Attention(dropout_p=0.5), n_iters, adapter="sdpa")
    found = []
    for call in (layer, lambda *x: sinkhorn_attention(*x, dropout_p=0.5, n_iters=n_iters)):
        torch.manual_seed(3)
        found.append(call(query, key, value))
    assert_close(*found, **EXACT)


@pytest.mark.parametrize("scale", [None, 0.1, 2.0])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_scale_and_groups_of_an_intercepted_call(scale, groups):
    """Also while it is watched, where the weights are computed a second time."""
    query, key, value = heads(4, 4 // groups, 4 // groups)
    options = {"scale": scale, "enable_gqa": groups > 1}
    layer = to_sinkformer(Attention(**options), 5, adapter="sdpa")
    expected = sinkhorn_attention(query, key, value, n_iters=5, **options)
    assert_close(layer(query, key, value), expected, **EXACT)
    with watch_attention(layer, keep_weights=True) as watch:
        assert_close(layer(query, key, value), expected, **EXACT)
    (seen,) = watch[""].calls
    value = value.repeat_interleave(groups, 1)
    assert_close(seen.weights @ value, expected, **EXACT)


class OwnSoftmax(nn.Module):
    """Attention with an `nn.Softmax`, by which modules of vit-pytorch are recognised."""

    def __init__(self):
        super().__init__()
        self.attend = nn.Softmax(dim=-1)

    def forward(self, scores):
        return self.attend(scores)


def test_padding_in_scores_is_masked_as_a_query_too(monkeypatch):
    """A key that no query may attend to is padding; its row would otherwise count in the column sums."""
    monkeypatch.setattr(OwnSoftmax, "__module__", "vit_pytorch.own_softmax")
    layer = to_sinkformer(OwnSoftmax(), 5)
    scores, valid = torch.randn(2, 3, 7, 7, dtype=torch.float64), torch.arange(7) < 5
    for lowest in (-torch.inf, torch.finfo(torch.float64).min):
        weights = layer(scores.masked_fill(~valid, lowest))
        assert_close(weights[..., :5, :5], sinkhorn(scores[..., :5, :5], n_iters=5), **EXACT)
        assert weights[..., 5:, :].eq(0).all()
