"""Masks that were added to scores are recognised by their values."""

import copy

import pytest
import torch
from torch.testing import assert_close

from sinkformers import to_sinkformer, to_transformer
from tests.conversion.inline_layers import MergedMaskAttention, PlainAttention, tokens


@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(torch.float64).min, -1e30, -1e9, -1e4])
def test_additive_masks_are_deletion(mask):
    layer, x = to_sinkformer(PlainAttention(), 5), tokens()
    bias = torch.zeros(3, 1, 1, 7, dtype=torch.float64)
    bias[..., 4:] = mask
    assert_close(layer(x, bias)[..., :4, :], layer(x[:, :4]), atol=1e-12, rtol=0)
    both = bias + bias.mT if mask > -1e100 else torch.minimum(bias, bias.mT)  # rows of padding are masked too
    assert_close(layer(x, both)[..., :4, :], layer(x[:, :4]), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [(-100.0, "a key is hidden from every query by a finite number"), (-5e3, "may be masked or not")],
)
def test_masks_that_cannot_be_told_from_scores_raise(mask, message):
    layer, x = to_sinkformer(PlainAttention(), 3), tokens()
    bias = torch.zeros(7, dtype=torch.float64)
    bias[5:] = mask
    with pytest.raises(ValueError, match=f"SinkhornPlainAttention: .*{message}.*-10000 instead"):
        layer(x, bias)
    to_sinkformer(layer, 1)
    assert layer(x, bias).equal(to_transformer(copy.deepcopy(layer))(x, bias))


@pytest.mark.parametrize("mask", [-torch.inf, -1e4, -100.0])
def test_causal_masks_are_refused(mask):
    layer, x = to_sinkformer(PlainAttention(), 3), tokens()
    bias = torch.full((7, 7), mask, dtype=torch.float64).triu(1)
    with pytest.raises(NotImplementedError, match=r"SinkhornPlainAttention: .*(order the tokens|as in a causal mask)"):
        layer(x, bias)


def later_hidden(sample):
    bias = torch.zeros(3, 1, 7, 7, dtype=torch.float64)
    bias[sample] = torch.full((7, 7), -100.0, dtype=torch.float64).triu(1)
    return bias


@pytest.mark.parametrize("case", ["padding elsewhere", "padding beside it", "reverse", "one sample", "window"])
def test_finite_numbers_that_order_the_tokens_of_one_sample_are_refused(case):
    layer, x, bias = to_sinkformer(PlainAttention(), 3), tokens(), later_hidden(1)
    if case == "padding elsewhere":
        bias[2, ..., 5:] = -torch.inf
    elif case == "padding beside it":
        bias[1, ..., 5:] = -torch.inf
    elif case == "reverse":
        bias = bias.mT
    elif case == "window":
        bias = bias.masked_fill(torch.ones(7, 7).tril(-3).bool(), -torch.inf)
    with pytest.raises(NotImplementedError, match="a finite number hides later tokens from earlier ones"):
        layer(x, bias)


def test_a_token_that_only_reads_is_no_padding():
    """It sees all others, and they do not see it: a mask that orders the tokens."""
    layer, x = to_sinkformer(PlainAttention(), 3), tokens()
    bias = torch.zeros(7, 7, dtype=torch.float64)
    bias[:6, 6] = -torch.inf
    with pytest.raises(NotImplementedError, match="must not order the tokens"):
        layer(x, bias)
    assert to_sinkformer(layer, 3, allow_one_way_mask=True)(x, bias)[..., 6, :].ne(0).all()


def test_windows_of_finite_masks_stay_biases():
    """Swin hides the parts of a shifted window from each other by −100; every token sees itself."""
    layer, x = to_sinkformer(PlainAttention(), 21), tokens()
    part = torch.arange(7) < 3
    bias = torch.zeros(7, 7, dtype=torch.float64).masked_fill(part[:, None] != part, -100.0)
    assert_close(layer(x, bias)[..., :3, :], layer(x[:, :3]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("hides", ["padding", "later tokens"])
def test_numbers_that_may_be_masks_are_warned_of(hides):
    """SoftMax weights of e⁻³⁰ to e⁻⁵⁰ may be those of masked keys, or of keys that no query looks at."""
    layer, x = to_sinkformer(PlainAttention(), 3), 0.1 * tokens()
    bias = torch.zeros(7, 7, dtype=torch.float64)
    where = torch.ones(7, 7).triu(1) == 1 if hides == "later tokens" else torch.arange(7) >= 5
    layer(x, bias.masked_fill(where, -10.0))
    with pytest.warns(UserWarning, match=r"SinkhornPlainAttention: .*less than exp\(-25\) in all heads"):
        layer(x, bias.masked_fill(where, -40.0))


@pytest.mark.parametrize("kind", [PlainAttention, MergedMaskAttention])
@pytest.mark.parametrize("mask", [-torch.inf, -1e4, -100.0])
def test_compiled_padding_is_deletion_whatever_number_hides_it(kind, mask):
    torch._dynamo.reset()
    layer, x = to_sinkformer(kind(), 5), tokens()
    bias = torch.zeros(3, 1, 1, 7, dtype=torch.float64)
    bias[1, ..., 4:] = mask
    compiled = torch.compile(layer, fullgraph=True, backend="eager")(x, bias)
    assert_close(compiled[1, ..., :4, :], layer(x[1:2, :4])[0], atol=1e-12, rtol=0)
    assert_close(compiled[2], layer(x[2:])[0], atol=1e-12, rtol=0)
