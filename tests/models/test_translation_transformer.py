"""The translation model: a plain computation, causality, padding without effect, and which attentions use Sinkhorn."""

import pytest
import torch
import torch.nn.functional as F

import sinkformers
from sinkformers.models import TranslationTransformer
from sinkformers.modules import SelfAttention
from tests.rounding import rounding

SMALL = {
    "source_vocabulary": 23,
    "target_vocabulary": 19,
    "length": 31,
    "dim": 12,
    "depth": 2,
    "heads": 3,
    "hidden": 17,
}
EXACT = rounding(4096, size=2)  # two small layers in float64, logits of up to 2: 2e-12


CAUSAL = [None, "streaming"]  # SoftMax in the decoder, or rows in order


def translator(**changes):
    return TranslationTransformer(**{**SMALL, **changes}).double().eval()


def batch(lengths=(11, 4, 7), t=5):
    source, target = torch.randint(23, (len(lengths), max(lengths))), torch.randint(19, (len(lengths), t))
    return source, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], target


def plain_heads(x):
    return x.unflatten(-1, (3, 4)).transpose(1, 2)


def plain_attention(query, key, value, allowed):
    scores = plain_heads(query) @ plain_heads(key).mT / 4**0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ plain_heads(value)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_decoder_computes_what_its_docstring_says(norm):
    model, (source, mask, target) = translator(norm=norm), batch()
    memory = model.encoder(12**0.5 * model.source(source) + model.positions[:11], mask)
    x = 12**0.5 * model.target(target) + model.positions[:5]
    for layer in model.decoder.layers:

        def around(residual, x, f):
            return residual.norm(x + f(x)) if norm == "post" else x + f(residual.norm(x))

        def causal(x, layer=layer):
            query, key, value = layer.attention.project(x).chunk(3, -1)
            allowed = torch.arange(5)[:, None] >= torch.arange(5)
            return layer.attention.out(plain_attention(query, key, value, allowed))

        def cross(x, layer=layer):
            key, value = layer.cross.source(memory).chunk(2, -1)
            return layer.cross.out(plain_attention(layer.cross.query(x), key, value, mask[:, None, None]))

        def feed_forward(x, layer=layer):
            return layer.feed_forward.narrow(F.relu(layer.feed_forward.widen(x)))

        x = around(layer.around_attention, x, causal)
        x = around(layer.around_cross, x, cross)
        x = around(layer.around_feed_forward, x, feed_forward)
    expected = model.decoder.last(x) @ model.target.weight.T
    torch.testing.assert_close(model(source, mask, target), expected, **EXACT)


@pytest.mark.parametrize("parts", [(1, 1, 1, 1, 1), (2, 3), (4, 1), (1, 4)])
@pytest.mark.parametrize("causal", CAUSAL)
def test_decoding_token_by_token_equals_decoding_at_once(parts, causal):
    model, (source, mask, target) = translator(n_iters=3, causal=causal), batch()
    state, logits = model.begin(source, mask), []
    for part in target.split(parts, 1):
        some, state = model.follow(part, state)
        logits.append(some)
    assert state.written == 5
    torch.testing.assert_close(torch.cat(logits, 1), model(source, mask, target), **EXACT)


@pytest.mark.parametrize("causal", CAUSAL)
def test_no_position_depends_on_a_later_one(causal):
    model, (source, mask, target) = translator(n_iters=3, causal=causal), batch()
    embedded = model.target(target).detach().requires_grad_()
    model.target.register_forward_hook(lambda *_: embedded)
    for place in range(5):
        gradient = torch.autograd.grad(model(source, mask, target)[:, place].sum(), embedded)[0]
        assert gradient[:, place + 1 :].eq(0).all()
        assert gradient[:, : place + 1].abs().sum((0, 2)).ne(0).all()


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("n_iters", [1, 3])
def test_padding_of_a_source_changes_no_logit(n_iters, causal):
    model, (source, mask, target) = translator(n_iters=n_iters, causal=causal), batch()
    logits = model(source, mask, target)
    for row, length in enumerate((11, 4, 7)):
        one = slice(row, row + 1)
        alone = model(source[one, :length], mask[one, :length], target[one])
        torch.testing.assert_close(logits[one], alone, **EXACT)
    assert torch.equal(model(source.masked_fill(~mask, 3), mask, target), logits)


def test_later_tokens_of_a_target_change_no_logit():
    model, (source, mask, target) = translator(), batch()
    longer = torch.cat([target, torch.randint(19, (3, 4))], 1)
    torch.testing.assert_close(model(source, mask, longer)[:, :5], model(source, mask, target), **EXACT)


def in_order(query, key, value, allowed):
    """Streaming attention with three normalisations, as its definition says: queries one after the other."""
    scores = (query @ key.mT / 4**0.5).exp().masked_fill(~allowed, 0.0)
    received, expected, rows = torch.zeros_like(scores[..., 0, :]), torch.zeros_like(scores[..., 0, :]), []
    for row, seen in zip(scores.unbind(-2), allowed.expand(scores.shape).unbind(-2), strict=True):
        received = received + row / row.sum(-1, keepdim=True)
        expected = expected + seen.double() / seen.sum(-1, keepdim=True)
        balanced = torch.where(seen, row * expected / received.where(seen, 1.0), 0.0)
        rows.append(balanced / balanced.sum(-1, keepdim=True))
    return (torch.stack(rows, -2) @ value).transpose(1, 2).flatten(2)


def test_streaming_attentions_follow_their_definition():
    model, (_, mask, _) = translator(n_iters=3, causal="streaming"), batch()
    x, memory = torch.randn(3, 5, 12, dtype=torch.float64), torch.randn(3, 11, 12, dtype=torch.float64)
    layer = model.decoder.layers[0]
    heads = map(plain_heads, layer.attention.project(x).chunk(3, -1))
    expected = layer.attention.out(in_order(*heads, torch.ones(5, 5, dtype=torch.bool).tril()))
    torch.testing.assert_close(layer.attention(x), expected, **EXACT)
    heads = map(plain_heads, (layer.cross.query(x), *layer.cross.source(memory).chunk(2, -1)))
    expected = layer.cross.out(in_order(*heads, mask[:, None, None]))
    torch.testing.assert_close(layer.cross(x, layer.cross.remember(memory), mask), expected, **EXACT)


def test_all_definitions_have_the_same_parameters():
    softmax, streaming, inputs = translator(n_iters=1), translator(n_iters=1, causal="streaming"), batch()
    streaming.load_state_dict(softmax.state_dict())
    assert torch.equal(softmax(*inputs), streaming(*inputs))
    three = translator(n_iters=3, causal="streaming")
    three.load_state_dict(softmax.state_dict())
    encoder = translator(n_iters=3)
    encoder.load_state_dict(softmax.state_dict())
    assert not torch.allclose(three(*inputs), encoder(*inputs))
    with pytest.raises(ValueError, match='causal must be None, for SoftMax in the decoder, or "streaming"; got \'pref'):
        translator(causal="prefix")


@torch.no_grad()  # so that caches write new tokens behind the others
def test_a_state_can_be_continued_twice():
    model, (source, mask, target) = translator(n_iters=3, causal="streaming"), batch()
    state = model.follow(target[:, :2], model.begin(source, mask))[1]
    state = model.follow(target[:, 2:3], state)[1]  # from here on a cache may have room for more tokens
    begun = model.follow(target[:, 3:4], state)[1]
    model.follow((target[:, 3:4] + 1) % 19, state)  # another text
    torch.testing.assert_close(model.follow(target[:, 4:], begun)[0], model(source, mask, target)[:, 4:], **EXACT)


def test_only_the_encoder_is_converted():
    transformer, sinkformer, inputs = translator(n_iters=1), translator(n_iters=5), batch()
    sinkformer.load_state_dict(transformer.state_dict())
    before = transformer(*inputs)
    report = sinkformers.to_sinkformer(transformer, n_iters=1).sinkformer_report
    assert torch.equal(transformer(*inputs), before)
    names = [entry.name for entry in report.entries if entry.adapter is not None]
    assert names == [f"encoder.layers.{layer}.attention" for layer in (0, 1)]
    assert str(report).count("[CausalAttention] unchanged: causal: ") == 2
    assert str(report).count("[CrossAttention] unchanged: cross-attention of a decoder: ") == 2
    sinkformers.to_sinkformer(transformer, n_iters=5)
    assert torch.equal(transformer(*inputs), sinkformer(*inputs))
    assert not torch.allclose(transformer(*inputs), before)
    assert len([layer for layer in transformer.modules() if isinstance(layer, SelfAttention)]) == 2


def test_first_weights_of_self_attention_are_drawn_as_fairseq_does():
    model = translator(dim=96, hidden=160, heads=4, source_vocabulary=500)
    assert model.source.weight.std().item() == pytest.approx(
        96**-0.5, rel=0.02
    )  # 48,000 draws: five standard errors are 0.016
    project = model.encoder.layers[0].attention.project
    assert project.weight.abs().max().item() == pytest.approx(
        (6 / (96 + 96)) ** 0.5 / 2**0.5, rel=0.01
    )  # the largest of 27,648 uniform draws
    assert project.bias.eq(0).all()


def test_a_sentence_that_is_too_long_is_refused():
    source, mask, target = batch((31,), t=32)
    with pytest.raises(
        ValueError,
        match=r"sentences may have at most 31 tokens; got 32. Cut them, or build the model with a larger length",
    ):
        translator()(source, mask, target)
