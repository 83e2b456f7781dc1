"""What code does not show is checked when it runs."""

import copy

import pytest
import torch
from torch.testing import assert_close

from sinkformers import to_sinkformer, to_transformer
from tests.conversion.inline_layers import (
    AmongHeadsAttention,
    ClampedAttention,
    EncoderOutputAttention,
    FeatureAttention,
    FeatureEinsumAttention,
    FilledAfterAttention,
    FilledOnlyAfterAttention,
    MaskedAfterAttention,
    MergedAttention,
    MixedHeadsAttention,
    OptionalAttention,
    PairAttention,
    PlainAttention,
    ReducingAttention,
    ReshapedAttention,
    sinkhorn_by_hand,
    tokens,
)
from tests.conversion.inline_other_layers import AmongUnnamedHeadsAttention


@pytest.mark.parametrize("kind", [OptionalAttention, EncoderOutputAttention])
def test_cross_attention_stays_softmax_even_if_square(kind):
    layer, x, other = kind(), tokens(), tokens()
    before = layer(x, other)
    to_sinkformer(layer, 5)
    assert layer(x, other).equal(before)
    assert_close(layer(x), sinkhorn_by_hand(layer, x, 5), atol=1e-12, rtol=0)
    (entry,) = layer.sinkformer_report.entries
    assert entry.calls == {"cross-attention call left SoftMax": 1, "SoftMax call": 1}


def test_separate_arguments_are_self_attention_if_they_are_the_same_tensor():
    layer, x, other = PairAttention(), tokens(), tokens()
    before = layer(x, other)
    to_sinkformer(layer, 5)
    assert layer(x, other).equal(before)
    assert_close(layer(x, x), sinkhorn_by_hand(layer, x, 5), atol=1e-12, rtol=0)


def test_fewer_keys_stay_softmax_with_a_warning():
    layer, x = ReducingAttention(), tokens()
    before = layer(x)
    to_sinkformer(layer, 3)
    with pytest.warns(
        UserWarning, match="SinkhornReducingAttention attends with 7 queries to 4 keys, and stays SoftMax"
    ):
        assert layer(x).equal(before)
    assert layer(x).equal(before)  # the warning is given once
    assert "2 × call with unequally many queries and keys left SoftMax" in str(layer.sinkformer_report)


def test_weights_that_are_used_in_another_shape_raise():
    layer, x = ReshapedAttention(), tokens(6)
    layer(x)
    with pytest.raises(RuntimeError, match=r"multiplies values with weights of shape.*Sinkhorn made them for 6 tokens"):
        to_sinkformer(layer, 3)(x)


def test_learned_tau_needs_heads_in_an_axis_of_their_own():
    layer = to_sinkformer(MergedAttention(), 3, tau="learned")
    with pytest.raises(NotImplementedError, match=r'tau="learned" has one value per head.*Pass a number'):
        layer(tokens())


def hidden(x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)
    mask[1, 5] = 0.0
    return mask


@pytest.mark.parametrize("kind", [MaskedAfterAttention, FilledOnlyAfterAttention])
@pytest.mark.parametrize("training", [False, True])
def test_weights_that_are_masked_after_softmax_raise(kind, training):
    layer, x = to_sinkformer(kind(), 3).train(training), tokens()
    with pytest.raises(NotImplementedError, match="masks its weights after SoftMax"):
        layer(x, hidden(x))
    layer(x, torch.full_like(hidden(x), 0.5))  # one factor for all entries
    to_sinkformer(layer, 1)
    assert layer(x, hidden(x)).equal(to_transformer(copy.deepcopy(layer))(x, hidden(x)))


@pytest.mark.parametrize(
    ("kind", "given"), [(ClampedAttention, 0.2), (MixedHeadsAttention, torch.randn(2, 2, dtype=torch.float64))]
)
def test_weights_that_are_changed_otherwise_raise(kind, given):
    layer, x = kind(), tokens()
    before = layer(x, given)
    with pytest.raises(NotImplementedError, match="after SoftMax, or changes them otherwise"):
        to_sinkformer(layer, 3)(x, given)
    assert_close(layer(x), sinkhorn_by_hand(layer, x, 3), atol=1e-12, rtol=0)
    assert to_sinkformer(layer, 1)(x, given).equal(before)


def test_weights_that_are_masked_before_and_after_softmax_are_sinkhorn():
    layer, x, mask = FilledAfterAttention(), tokens(), hidden(tokens()[:, :7])
    mask[5, 1] = 0.0
    expected = sinkhorn_by_hand(layer, x, 5, lambda scores: scores.masked_fill(mask == 0, -torch.inf))
    assert_close(to_sinkformer(layer, 5)(x, mask), expected, atol=1e-12, rtol=0)
    assert_close(layer(x), sinkhorn_by_hand(layer, x, 5), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("kind", "what", "n"),
    [
        (FeatureAttention, "channels", 7),
        (FeatureAttention, "channels", 1),  # 8 features are not one for each of 6 heads
        (FeatureEinsumAttention, "channels", 7),
        (AmongHeadsAttention, "heads", 7),
        (AmongUnnamedHeadsAttention, "heads", 7),
    ],
)
def test_attention_among_channels_or_heads_stays_softmax_with_a_warning(kind, what, n):
    layer, x = kind(), tokens(n)
    before = layer(x)
    to_sinkformer(layer, 3)
    with pytest.warns(UserWarning, match=f"attends among {what}, and stays SoftMax there"):
        assert layer(x).equal(before)
    assert f"1 × call that attends among {what} left SoftMax" in str(layer.sinkformer_report)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_as_many_tokens_as_heads_or_features_are_tokens(n):
    """4 features in each of 2 heads."""
    layer, x = PlainAttention(), tokens(n)
    assert_close(to_sinkformer(layer, 5)(x), sinkhorn_by_hand(layer, x, 5), atol=1e-12, rtol=0)
