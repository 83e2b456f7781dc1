"""What is no attention among tokens is left alone, by what its code says."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import to_sinkformer, to_transformer
from tests.conversion.inline_layers import (
    SIZE,
    EinsumAttention,
    MergedAttention,
    OwnMethodAttention,
    PlainAttention,
    PositionalAttention,
    SdpaAttention,
    SingleAttention,
    SoftCapAttention,
    TransposedAttention,
    sinkhorn_by_hand,
    tokens,
)
from tests.conversion.inline_other_layers import (
    AddedInPlaceAttention,
    AveragedAttention,
    BatchedEinsumAttention,
    ChannelAttention,
    ColumnAttention,
    CrossAttention,
    ExpertAttention,
    FusedAttention,
    FusedHelperAttention,
    GatedAttention,
    HalvesAttention,
    HelperAttention,
    InnerFunctionAttention,
    KeywordAttention,
    LandmarkAttention,
    LogitsAttention,
    LoopAttention,
    MappedAttention,
    Mixer,
    NormalisedHalvesAttention,
    OffByOneAttention,
    OtherSideAttention,
    PairsAttention,
    PartZeroAttention,
    PrivateAttention,
    SecondMethodAttention,
    SpecialAttention,
    SubscriptAttention,
    SummaryAttention,
    TransposedInPlaceAttention,
    TriangleAttention,
    UnpackedAttention,
    UnprojectedAttention,
    ViewZeroAttention,
    WrappedAttention,
)

SUPPORTED = [
    PlainAttention,
    SoftCapAttention,
    EinsumAttention,
    MergedAttention,
    TransposedAttention,
    OwnMethodAttention,
    PositionalAttention,
]
REFUSED = {
    GatedAttention: "pools, gates or normalises something else",
    SummaryAttention: "pools, gates or normalises something else",
    LogitsAttention: "pools, gates or normalises something else",
    OtherSideAttention: "pools, gates or normalises something else",
    BatchedEinsumAttention: "pools, gates or normalises something else",
    ColumnAttention: "not over the last axis",
    ExpertAttention: "not of a product of queries and keys",
    LandmarkAttention: "another SoftMax",
    CrossAttention: "cross-attention",
    TriangleAttention: "causal",
    UnpackedAttention: "different inputs",
    SubscriptAttention: "different inputs",
    HalvesAttention: "different inputs",
    MappedAttention: "different inputs",
    KeywordAttention: "different inputs",
    NormalisedHalvesAttention: "different inputs",
    PairsAttention: "different inputs",
    LoopAttention: "inside of a loop",
    InnerFunctionAttention: "inside of a function",
    FusedAttention: "may attend by a fused function",
    FusedHelperAttention: "may attend by a fused function",
    HelperAttention: "calls a function that has a SoftMax of its own",
    SecondMethodAttention: "calls a function that has a SoftMax of its own",
    ChannelAttention: "among channels, by its name",
    UnprojectedAttention: "has no projections",
    SpecialAttention: "another SoftMax",
    TransposedInPlaceAttention: "in place",
    PartZeroAttention: "in place",
    ViewZeroAttention: "in place",
    AveragedAttention: "joins the weights of several",
    AddedInPlaceAttention: "in place",
    OffByOneAttention: "neither is torch's nor",
    PrivateAttention: "neither is torch's nor",
    WrappedAttention: "neither is torch's nor",
    Mixer: "No attention was found at all",
}


@pytest.mark.parametrize("kind", SUPPORTED)
def test_what_is_attention_is_converted(kind):
    layer, x = kind(), tokens()
    before = layer(x)
    to_sinkformer(layer, 1)
    assert layer(x).equal(before)
    capped = kind is SoftCapAttention
    expected = sinkhorn_by_hand(layer, x, 5, lambda scores: 5 * torch.tanh(scores / 5) if capped else scores)
    to_sinkformer(layer, 5)
    assert_close(layer(x), expected, atol=1e-12, rtol=0)
    assert to_transformer(layer)(x).equal(before)


def test_a_dtype_that_is_given_by_position_is_kept():
    layer, x = SingleAttention(), tokens()
    before = layer(x)
    assert to_sinkformer(layer, 1)(x).equal(before)
    assert (to_sinkformer(layer, 5)(x) - sinkhorn_by_hand(layer, x, 5)).abs().max() > 1e-12  # float32 rounds to 6e-8


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_is_refused_with_its_reason(kind):
    layer = kind()
    with pytest.raises(ValueError, match=f"(?s)has no bidirectional self-attention.*{REFUSED[kind]}"):
        to_sinkformer(layer)
    assert type(layer) is kind


@pytest.mark.parametrize(
    ("layer", "adapter", "name"),
    [
        (PlainAttention(), None, "forward"),
        (OwnMethodAttention(), None, "attend"),
        (SdpaAttention(), "sdpa", "forward"),
        (nn.MultiheadAttention(SIZE, 2), None, "forward"),
    ],
)
def test_methods_set_on_the_module_are_refused(layer, adapter, name):
    """A class does not replace them: conversion would have no effect."""
    setattr(layer, name, getattr(layer, name))
    with pytest.raises(ValueError, match=f"its {name} is set on the module itself"):
        to_sinkformer(layer, adapter=adapter)
