"""Decoders that compute SoftMax themselves, with rows normalised in order."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers as hf

from sinkformers import set_n_iters, to_sinkformer, to_transformer, watch_attention
from tests import causal_oracle
from tests.conversion.inline_layers import PlainAttention, tokens

EXACT = {"atol": 1e-5, "rtol": 0}  # they compute SoftMax in float32
SIZES = {"vocab_size": 53, "n_layer": 2, "n_head": 3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DECODERS = {
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(**SIZES, hidden_size=24)),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**SIZES, n_embd=24, n_positions=32, rotary_dim=4)),
    "codegen": lambda: hf.CodeGenForCausalLM(
        hf.CodeGenConfig(**{**SIZES, "n_head": 4}, n_embd=32, n_positions=32, n_ctx=32, rotary_dim=4)
    ),
}
IDS = torch.tensor([[12, 35, 9, 50, 6, 17, 21], [5, 40, 33, 8, 0, 0, 0]])
VALID = IDS > 0


def build(name):
    torch.manual_seed(0)
    model = DECODERS[name]().eval().double()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and "pos" not in key:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def logits(model, ids=IDS, **options):
    return model(ids, use_cache=False, **options).logits


@pytest.mark.parametrize("name", DECODERS)
def test_one_iteration_is_the_original_and_three_are_in_order(name):
    model = build(name)
    before = logits(model, attention_mask=VALID.long())
    with pytest.raises(ValueError, match=r'(?s)no bidirectional self-attention.*causal: .*causal="streaming"'):
        to_sinkformer(model)
    to_sinkformer(model, 1, causal="streaming")
    assert [entry.adapter for entry in model.sinkformer_report.converted.values()] == ["softmax"] * 2
    assert logits(model, attention_mask=VALID.long())[VALID].equal(before[VALID])
    set_n_iters(model, 3)
    together = logits(model, attention_mask=VALID.long())
    assert not torch.allclose(together[VALID], before[VALID], atol=1e-2)
    assert_close(together[1, :4], logits(model, IDS[1:, :4])[0], **EXACT)  # padding is deletion
    assert_close(logits(model, IDS[:1, :5])[0], together[0, :5], **EXACT)  # what follows changes nothing
    to_transformer(model)
    assert logits(model, attention_mask=VALID.long()).equal(before)


@pytest.mark.parametrize("name", DECODERS)
def test_no_output_depends_on_a_later_token(name):
    model = to_sinkformer(build(name), 5, causal="streaming")
    x = model.get_input_embeddings()(IDS[:1]).detach().requires_grad_()
    out = model(inputs_embeds=x, use_cache=False).logits
    for i in (0, 3, 5):
        (found,) = torch.autograd.grad(out[:, i].square().sum(), x, retain_graph=True)
        assert found[:, i + 1 :].count_nonzero() == 0
        assert found[:, i].abs().max() > 1e-9


def test_generation_needs_no_cache_and_says_so():
    model = to_sinkformer(build("bloom"), 3, causal="streaming")
    options = {"max_new_tokens": 4, "do_sample": False}
    text = model.generate(IDS[:1], use_cache=False, **options)
    assert text.shape == (1, 11)
    assert text[0, 7] == logits(model, IDS[:1])[0, -1].argmax()
    with pytest.raises(NotImplementedError, match=r"called with 1 queries and 8 keys.*use_cache=False"):
        model.generate(IDS[:1], use_cache=True, **options)


def test_weights_are_those_of_the_oracle():
    layer, x = to_sinkformer(PlainAttention(), 3, causal="streaming", select="*"), tokens()
    bias = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)
    query, key, value = layer.heads(x)
    with watch_attention(layer, keep_weights=True) as watch:
        out = layer(x, bias)
    expected = causal_oracle.weights(query @ key.mT, 3)
    (call,) = watch[""].calls
    assert_close(call.weights, expected, atol=1e-12, rtol=0)
    assert_close(out, expected @ value, atol=1e-12, rtol=0)


def test_finite_triangles():
    """−10,000 is a mask. Of −100, in whose place column steps would put later tokens, nothing is left to guess."""
    layer, x = to_sinkformer(PlainAttention(), 3, causal="streaming", select="*"), tokens()
    later = torch.ones(7, 7, dtype=torch.float64).triu(1) == 1
    exact = layer(x, torch.zeros_like(x[0, :, :7]).masked_fill(later, -torch.inf))
    assert_close(layer(x, torch.zeros_like(x[0, :, :7]).masked_fill(later, -1e4)), exact, atol=1e-12, rtol=0)
    with pytest.raises(NotImplementedError, match="a finite number hides later tokens from earlier ones"):
        layer(x, torch.zeros_like(x[0, :, :7]).masked_fill(later, -100.0))
