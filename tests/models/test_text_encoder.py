"""The text encoder: a plain computation, padding without effect, and conversion."""

import math

import pytest
import torch
import torch.nn.functional as F

import sinkformers
from sinkformers.models import TextEncoder
from sinkformers.models.encoder import sinusoids
from tests.rounding import rounding

SMALL = {"vocabulary": 23, "length": 13, "classes": 3, "dim": 10, "depth": 2, "heads": 2, "hidden": 17}
EXACT = rounding(4096)  # two small layers in float64, with sums of up to some ten products: 9e-13


def encoder(**changes):
    return TextEncoder(**{**SMALL, **changes}).double()


def plain_attention(layer, x, n_iters):
    query, key, value = layer.project(x).chunk(3, -1)
    outs = []
    for part in (slice(0, 5), slice(5, 10)):
        q, k, v = query[..., part], key[..., part], value[..., part]
        outs.append(sinkformers.sinkhorn(q @ k.mT / 5**0.5, n_iters=n_iters, backend="reference") @ v)
    return layer.out(torch.cat(outs, -1))


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("n_iters", [1, 3])
def test_the_network_computes_what_its_docstring_says(norm, positions, n_iters):
    model, tokens = encoder(norm=norm, positions=positions, n_iters=n_iters), torch.randint(23, (3, 7))
    x = model.embed(tokens) + model.positions[:7]
    for layer in model.encoder.layers:
        first, second = layer.around_attention.norm, layer.around_feed_forward.norm

        def feed_forward(x, layer=layer):
            return layer.feed_forward.narrow(F.relu(layer.feed_forward.widen(x)))

        if norm == "post":
            x = first(x + plain_attention(layer.attention, x, n_iters))
            x = second(x + feed_forward(x))
        else:
            x = x + plain_attention(layer.attention, first(x), n_iters)
            x = x + feed_forward(second(x))
    if norm == "pre":
        x = model.encoder.last(x)
    torch.testing.assert_close(model(tokens), model.head(x.max(1).values), **EXACT)


def test_sinusoids_are_the_papers():
    table = sinusoids(11, 6)
    for place, feature in ((0, 0), (0, 1), (7, 2), (10, 5)):
        angle = place / 10_000 ** (2 * (feature // 2) / 6)
        assert table[place, feature].item() == pytest.approx(
            (math.sin, math.cos)[feature % 2](angle), abs=1e-5
        )  # float32 angles of up to 10, whose rates are exponentials
    assert sinusoids(4, 5).shape == (4, 5)


@pytest.mark.parametrize("n_iters", [1, 3])
def test_padding_changes_no_logit(n_iters):
    model, tokens = encoder(n_iters=n_iters), torch.randint(23, (3, 11))
    lengths = (11, 4, 1)
    mask = torch.arange(11) < torch.tensor(lengths)[:, None]
    logits = model(tokens, mask)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(logits[row], model(tokens[row : row + 1, :length])[0], **EXACT)
    assert torch.equal(model(tokens.masked_fill(~mask, 5), mask), logits)


def test_a_text_without_tokens_is_finite_and_changes_no_other():
    model, tokens = encoder(), torch.randint(23, (2, 5))
    logits = model(tokens, torch.tensor([[True] * 5, [False] * 5]))
    torch.testing.assert_close(logits[1], model.head.bias)
    torch.testing.assert_close(logits[:1], model(tokens[:1]), **EXACT)
    logits.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(5,), (2, 0), (2, 3, 4)])
def test_tokens_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"tokens must have the shape \(batch, n\) with n ≥ 1; got \("):
        encoder()(torch.zeros(shape, dtype=torch.long))


def test_only_learned_positions_are_parameters():
    assert "positions" in dict(encoder(positions="learned").named_parameters())
    fixed = encoder()
    assert "positions" not in fixed.state_dict()
    torch.testing.assert_close(fixed.positions, sinusoids(13, 10).double())


def test_a_converted_transformer_equals_a_sinkformer():
    tokens, mask = torch.randint(23, (2, 9)), torch.arange(9) < torch.tensor([[9], [5]])
    built, converted = encoder(n_iters=5), encoder(n_iters=1)
    converted.load_state_dict(built.state_dict())
    assert not torch.allclose(converted(tokens, mask), built(tokens, mask))
    sinkformers.to_sinkformer(converted, n_iters=5)
    assert torch.equal(converted(tokens, mask), built(tokens, mask))


def test_dropout_is_for_training():
    model, tokens = encoder(dropout=0.5), torch.randint(23, (2, 9))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "mid"}, r'norm must be "post", after each sum, or "pre", before each layer; got \'mid\''),
        ({"positions": "none"}, r'positions must be "sinusoidal" or "learned"; got \'none\''),
        ({"heads": 3}, r"num_heads must divide dim, or head_dim must be given; got num_heads=3, dim=10"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        encoder(**changes)


def test_a_text_that_is_too_long_is_refused():
    with pytest.raises(
        ValueError, match=r"texts may have 13 tokens; got 14. Cut them, or build the model with a larger length"
    ):
        encoder()(torch.zeros(1, 14, dtype=torch.int64))
