"""Dropout of residual branches: in training only, of the branch only, and with the right scale."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers.models import TextEncoder, TranslationTransformer, ViT
from sinkformers.models.decoder import DecoderLayer, LayerState
from sinkformers.models.encoder import EncoderLayer, Residual
from sinkformers.models.vit import Block
from sinkformers.modules import SelfAttention
from tests.rounding import rounding

TEXT = {"dim": 8, "depth": 2, "heads": 2, "hidden": 11, "length": 9}


def randomised(model: nn.Module) -> nn.Module:
    """Fill all parameters with positive numbers, so that a layer changes tokens that are zero too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.1, 1.0)
    return model


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_an_entry_is_dropped_or_scaled(norm):
    beside = Residual(6, norm, 0.25).double()
    x, f = torch.randn(101, 6).double(), torch.rand(101, 6).double() + 1
    draws = []
    beside.norm.register_forward_pre_hook(lambda _, inputs: draws.append(inputs[0]))
    out = beside.leave(x, f)
    added = (draws[0] if norm == "post" else out) - x
    dropped = added.abs() < 1e-12  # the others are above 1
    assert 0.15 < dropped.double().mean() < 0.35  # 606 draws of ¼: five standard deviations are 0.09
    assert_close(added[~dropped], f[~dropped] / 0.75, **rounding(8, size=8))
    expected = beside.norm(x + f) if norm == "post" else x + f
    assert beside.eval().leave(x, f).equal(expected)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_layer_with_all_dropped_is_its_skip_connections(kind, norm):
    x, y = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    if kind == "encoder":
        layer = randomised(EncoderLayer(SelfAttention(8, 2), 8, 11, norm, 1.0))
        around, args = (layer.around_attention, layer.around_feed_forward), ()
    else:
        layer = randomised(DecoderLayer(8, 2, 11, norm, 1.0, 1, 1.0))
        around = (layer.around_attention, layer.around_cross, layer.around_feed_forward)
        args = LayerState(layer.cross.remember(y)), torch.ones(2, 7, dtype=torch.bool)
    for training in (True, False):
        out = layer.train(training)(x, *args)
        out = out if kind == "encoder" else out[0]
        expected = x
        for beside in around if norm == "post" else ():
            expected = beside.norm(expected)
        assert torch.equal(out, expected) == training


def test_a_block_with_all_dropped_is_its_skip_connections():
    block, x = randomised(Block(8, SelfAttention(8, 2), 11, 1.0)), torch.randn(2, 5, 8)
    assert block(x).equal(x)
    assert not block.eval()(x).equal(x)


def test_attention_with_all_weights_dropped_is_the_bias_of_its_output():
    layer, x = SelfAttention(8, 2, dropout=1.0), torch.randn(2, 5, 8)
    assert layer(x).equal(layer.out.bias.expand(2, 5, 8))
    assert not layer.eval()(x).allclose(layer.out.bias.expand(2, 5, 8))


def test_models_pass_their_dropout_to_every_layer():
    """With all tokens and all branches dropped, the network computes with zeros."""
    zeros = torch.zeros(8)
    text = randomised(TextEncoder(vocabulary=11, classes=3, norm="pre", dropout=1.0, **TEXT))
    tokens, target = torch.randint(11, (2, 7)), torch.randint(13, (2, 5))
    assert_close(text(tokens), text.head(text.encoder.last(zeros)).expand(2, 3))
    assert not text.eval()(tokens).allclose(text.head(text.encoder.last(zeros)))
    options = {"source_vocabulary": 11, "target_vocabulary": 13, "norm": "pre", "dropout": 1.0}
    translator, seen = randomised(TranslationTransformer(**options, **TEXT)), []
    translator.encoder.last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = translator(tokens, torch.ones(2, 7, dtype=torch.bool), target)
    assert seen[0].eq(0).all()
    assert_close(logits, (translator.decoder.last(zeros) @ translator.target.weight.T).expand(2, 5, 13))
    sizes = {"image": 4, "patch": 2, "channels": 1, "classes": 3, "dim": 8, "depth": 2, "heads": 2, "mlp_dim": 11}
    vit = randomised(ViT(**sizes, dropout=1.0))
    assert_close(vit(torch.randn(2, 1, 4, 4)), vit.head(zeros).expand(2, 3))
    assert all(block.attention.dropout == 1.0 for block in vit.blocks)
