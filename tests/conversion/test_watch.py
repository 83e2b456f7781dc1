"""`watch_attention`: column sums, entropies and marginal errors."""

import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import to_sinkformer, watch_attention
from tests.conversion.torch_encoders import EXACT, VALID, agree, encoder, run

BALANCED = 2**-10  # column error after 21 iterations, if each of the 10 column steps halves it at least


@pytest.mark.parametrize("padded", [True, False])
def test_watched_column_sums_are_one(padded):
    model = to_sinkformer(encoder(), n_iters=21)
    plain = run(model, padded)
    with watch_attention(model) as watch:
        watched = run(model, padded)
    agree(watched, plain, atol=0.0)
    assert list(watch) == ["layers.0.self_attn", "layers.1.self_attn"]
    valid = VALID if padded else torch.ones_like(VALID)
    for layer in watch.values():
        (seen,) = layer.calls
        assert seen.rows.equal(valid[:, None].expand(3, 2, 7))
        assert seen.columns.equal(seen.rows)
        assert_close(seen.column_sums, seen.columns.double(), atol=BALANCED, rtol=0)
        assert seen.row_error.max() < EXACT
        deviation = (seen.column_sums - 1).abs().masked_fill(~seen.columns, 0).amax(-1)
        assert_close(seen.column_error, deviation, atol=EXACT, rtol=0)
        assert (seen.row_entropy[seen.rows] > 0).all()
        assert (seen.row_entropy <= seen.columns.sum(-1, keepdim=True).double().log() + EXACT).all()
    run(model, padded)
    assert all(len(layer.calls) == 1 for layer in watch.values())
    assert re.search(r"^layers\.1\.self_attn +1 ", str(watch), re.MULTILINE)  # its largest column sum


def test_uniform_attention_has_the_entropy_of_the_valid_tokens():
    module = to_sinkformer(nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64), 3)
    nn.init.zeros_(module.in_proj_weight)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    with watch_attention(module) as watch:
        module(x, x, x, key_padding_mask=~VALID, need_weights=False)
    (seen,) = watch[""].calls
    expected = torch.where(VALID, VALID.sum(-1, keepdim=True).double().log(), 0.0)
    assert_close(seen.row_entropy, expected[:, None].expand(3, 2, 7), atol=EXACT, rtol=0)


def test_softmax_is_watched_at_one_iteration():
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    weights = module(x, x, x, average_attn_weights=False)[1]
    with watch_attention(to_sinkformer(module, 1)) as watch:
        module(x, x, x)
    assert_close(watch[""].calls[0].column_sums, weights.sum(-2), atol=EXACT, rtol=0)
    assert_close(watch[""].calls[0].row_entropy, -(weights * weights.log()).sum(-1), atol=EXACT, rtol=0)
