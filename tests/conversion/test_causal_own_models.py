"""Causal attention of our own models: converted on request, equal to models that are built so, restored and watched."""

import pytest
import torch

from sinkformers import to_sinkformer, to_transformer, watch_attention
from sinkformers.models import LanguageModel, TranslationTransformer
from tests.rounding import rounding

SIZES = {"length": 31, "dim": 12, "depth": 2, "heads": 3, "hidden": 17}
EXACT = rounding(4096, size=2)
TOKENS = torch.randint(19, (3, 11), generator=torch.Generator().manual_seed(1))


def language_model(**settings):
    torch.manual_seed(0)
    model = LanguageModel(vocabulary=19, **SIZES, **settings).double().eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.project.weight.mul_(40.0)  # far from uniform
    return model


def translator(**settings):
    torch.manual_seed(0)
    return TranslationTransformer(source_vocabulary=23, target_vocabulary=19, **SIZES, **settings).double().eval()


def source():
    return TOKENS, torch.arange(11) < torch.tensor([[11], [4], [7]]), TOKENS[:, :5]


@pytest.mark.parametrize("tau", [1.0, 0.5, "learned"])
def test_a_converted_language_model_equals_one_that_is_built_so(tau):
    model, built = language_model(n_iters=1), language_model(n_iters=3, tau=tau)
    before = model(TOKENS)
    to_sinkformer(model, n_iters=3, tau=tau, causal="streaming")
    assert model.state_dict().keys() == built.state_dict().keys()
    torch.testing.assert_close(model(TOKENS), built(TOKENS), **EXACT)
    assert not torch.allclose(model(TOKENS), before)
    assert torch.equal(model.generate(TOKENS, tokens=9), built.generate(TOKENS, tokens=9, use_cache=False))
    assert "causal=streaming" in repr(model.layers[0].attention)
    to_transformer(model)
    assert torch.equal(model(TOKENS), before)
    assert "causal=streaming" in repr(model.layers[0].attention)


def test_a_language_model_keeps_its_definition():
    model, built = language_model(n_iters=1), language_model(n_iters=3)
    torch.testing.assert_close(to_sinkformer(model, n_iters=3)(TOKENS), built(TOKENS), **EXACT)
    with pytest.raises(ValueError, match=r'convert it with causal="streaming", which normalises rows in order'):
        to_sinkformer(language_model(causal="prefix"), n_iters=5)
    with pytest.raises(ValueError, match="odd, finite n_iters"):
        to_sinkformer(language_model(), n_iters=4)


def test_all_three_attentions_of_a_translation_model_are_converted():
    model, built = translator(n_iters=1), translator(n_iters=3, causal="streaming")
    before = model(*source())
    report = to_sinkformer(model, n_iters=3, causal="streaming").sinkformer_report
    assert sum(entry.adapter is not None for entry in report.entries) == 6
    torch.testing.assert_close(model(*source()), built(*source()), **EXACT)
    to_transformer(model)
    assert torch.equal(model(*source()), before)


def test_only_the_encoder_is_converted_by_default():
    model, built = translator(n_iters=1), translator(n_iters=3)
    to_sinkformer(model, n_iters=3)
    torch.testing.assert_close(model(*source()), built(*source()), **EXACT)


@pytest.mark.parametrize("n_iters", [1, 3])
def test_column_sums_are_relative_to_uniform_attention(n_iters):
    """Streaming attention of tokens that are all alike is uniform, and so is SoftMax: every column has its share."""
    model = language_model(n_iters=n_iters, positions="learned")
    model.positions.data.zero_()
    out = model(TOKENS)
    with watch_attention(model) as watch:
        model(torch.zeros(2, 7, dtype=torch.int64))
        assert torch.equal(model(TOKENS), out)
    assert list(watch) == ["layers.0.attention", "layers.1.attention"]
    for module in watch.values():
        alike, others = module.calls
        torch.testing.assert_close(alike.column_sums, torch.ones(2, 3, 7).double(), **EXACT)
        assert others.column_error.max() > 0.1


def test_a_decoder_of_softmax_is_not_watched():
    model = translator(n_iters=3)
    with watch_attention(model) as watch:
        model(*source())
    assert list(watch) == ["encoder.layers.0.attention", "encoder.layers.1.attention"]
    streaming = translator(n_iters=3, causal="streaming")
    with watch_attention(streaming) as watch:
        streaming(*source())
    assert len(watch) == 6
    assert all(len(module.calls) == 1 for module in watch.values())
