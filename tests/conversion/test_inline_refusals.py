"""What is no attention among tokens is left alone, by what its code says, and checked again when it runs."""

import copy
import functools
import importlib
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from sinkformers import sinkhorn, to_sinkformer, to_transformer

SIZE = 8


class Heads(nn.Module):
    """Queries, keys and values of two heads."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(SIZE, 3 * SIZE, dtype=torch.float64)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, SIZE // 2)).permute(2, 0, 3, 1, 4).unbind(0)


class PlainAttention(Heads):
    def forward(self, x, mask=None):
        query, key, value = self.heads(x)
        scores = query @ key.mT
        if mask is not None:
            scores = scores + mask
        return scores.softmax(-1) @ value


class SoftCapAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        scores = 5.0 * torch.tanh(query @ key.mT / 5.0)
        return torch.matmul(F.dropout(torch.softmax(scores, dim=-1), 0.0), value)


class EinsumAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key)
        return torch.einsum("bhqk,bhkd->bhqd", nn.Softmax(dim=-1)(scores), value)


class MergedAttention(Heads):
    """Batch and heads in one axis, and a view of the weights."""

    def forward(self, x):
        query, key, value = (each.flatten(0, 1) for each in self.heads(x))
        weights = F.softmax(torch.bmm(query, key.transpose(1, 2)), dim=-1)
        weights = weights.view(-1, 2, weights.shape[-2], weights.shape[-1])
        return weights @ value.view(-1, 2, value.shape[-2], value.shape[-1])


class TransposedAttention(Heads):
    """Values on the left, as in convolutional models."""

    def forward(self, x):
        query, key, value = self.heads(x)
        weights = F.softmax(query @ key.mT, dim=3)
        return (value.mT @ weights.transpose(-1, -2)).mT


class GatedAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        return torch.softmax(query * key, dim=-1) * value


class SummaryAttention(Heads):
    """Weights of tokens by a product with one vector, multiplied with the tokens and added up."""

    def forward(self, x):
        query, _, value = self.heads(x)
        weights = (query @ query[0, 0, 0]).softmax(dim=-1)
        return (weights[..., None] * value).sum(-2)


class ColumnAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-2) @ value


class OtherSideAttention(Heads):
    """Keys are mixed by the columns of the weights: SoftMax is over what the product does not add up."""

    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-1).mT @ value


class BatchedEinsumAttention(Heads):
    """The axis before the last is heads, which values share."""

    def forward(self, x):
        query, key, value = self.heads(x)
        weights = torch.einsum("bhqd,bhkd->bqhk", query, key).softmax(-1)
        return torch.einsum("bqhk,bhkd->bhqd", weights, value)


class ExpertAttention(Heads):
    """A router: scores of experts that are no product of two tensors of tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(SIZE, 5, dtype=torch.float64)
        self.experts = nn.Parameter(torch.randn(5, SIZE, dtype=torch.float64))

    def forward(self, x):
        return self.router(x).softmax(-1) @ self.experts


class LandmarkAttention(Heads):
    """Two SoftMax that are multiplied with each other first, as in Nyström's approximation."""

    def forward(self, x):
        query, key, value = self.heads(x)
        first = F.softmax(query @ key.mT, dim=-1)
        second = F.softmax(key @ query.mT, dim=-1)
        return first @ (second @ value)


class LogitsAttention(Heads):
    def forward(self, x):
        query, key, _ = self.heads(x)
        return F.softmax(query @ key.mT, dim=-1)


class CrossAttention(Heads):
    def forward(self, x, memory):
        query, key, value = self.heads(x)[0], *self.heads(memory)[1:]
        return (query @ key.mT).softmax(-1) @ value


class OptionalAttention(Heads):
    """Self-attention, or cross-attention if it is given another set."""

    def forward(self, x, states=None):
        query, key, value = self.heads(x)
        if states is not None:
            _, key, value = self.heads(states)
        return (query @ key.mT).softmax(-1) @ value


class PairAttention(Heads):
    """Queries and keys are separate arguments, as in `nn.MultiheadAttention`."""

    def forward(self, query, key):
        queries, keys, values = self.heads(query)[0], *self.heads(key)[1:]
        return (queries @ keys.mT).softmax(-1) @ values


class OwnMethodAttention(Heads):
    def attend(self, query, key, value):
        return (query @ key.mT).softmax(-1) @ value

    def forward(self, x):
        query, key, value = self.heads(x)
        return self.attend(query, key, value)


class OffByOneSoftmax(nn.Softmax):
    def forward(self, input):
        weights = (input - input.amax(-1, keepdim=True)).exp()
        return weights / (1 + weights.sum(-1, keepdim=True))


class OffByOneAttention(Heads):
    def __init__(self):
        super().__init__()
        self.normalise = OffByOneSoftmax(dim=-1)

    def forward(self, x):
        query, key, value = self.heads(x)
        return self.normalise(query @ key.mT) @ value


class PrivateAttention(Heads):
    __scale = 0.3

    def forward(self, x):
        query, key, value = self.heads(x)
        return torch.softmax(self.__scale * query @ key.mT, -1) @ value


def twice(function):
    @functools.wraps(function)
    def doubled(*args):
        return 2 * function(*args)

    return doubled


class WrappedAttention(Heads):
    @torch.no_grad()
    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-1) @ value


WrappedAttention.forward = twice(WrappedAttention.forward)


class PositionalAttention(Heads):
    """Arguments by position only, and a decorator."""

    @torch.no_grad()
    def forward(self, x, /):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-1, torch.float64) @ value


class UnpackedAttention(Heads):
    def forward(self, x):
        one, two = x
        return (self.heads(one)[0] @ self.heads(two)[1].mT).softmax(-1) @ self.heads(two)[2]


class SubscriptAttention(Heads):
    def forward(self, x):
        return (self.heads(x[0])[0] @ self.heads(x[1])[1].mT).softmax(-1) @ self.heads(x[1])[2]


class HalvesAttention(Heads):
    def forward(self, x):
        one, two = x.chunk(2, 1)
        return (self.heads(one)[0] @ self.heads(two)[1].mT).softmax(-1) @ self.heads(two)[2]


class MappedAttention(Heads):
    def forward(self, x):
        one, two = (self.heads(each) for each in x)
        return (one[0] @ two[1].mT).softmax(-1) @ two[2]


class KeywordAttention(Heads):
    def forward(self, x, **given):
        other = given.get("context", x)
        return (self.heads(x)[0] @ self.heads(other)[1].mT).softmax(-1) @ self.heads(other)[2]


class EncoderOutputAttention(Heads):
    def forward(self, x, encoder_output=None):
        other = x if encoder_output is None else encoder_output
        return (self.heads(x)[0] @ self.heads(other)[1].mT).softmax(-1) @ self.heads(other)[2]


class LoopAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        weights = query @ key.mT
        for _ in range(2):
            weights = weights.softmax(-1)
        return weights @ value


class TransposedInPlaceAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1)
        weights.transpose_(-1, -2)
        return weights @ value


class PartZeroAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1)
        weights[..., 0] = 0
        return weights @ value


class ViewZeroAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1)
        weights[..., 0].zero_()
        return weights @ value


class SingleAttention(Heads):
    """SoftMax in single precision, which is given by position."""

    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-1, torch.float32).to(value.dtype) @ value


class TriangleAttention(PlainAttention):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.ones(1, 1, 7, 7).tril())


class Mixer(PlainAttention):
    """Attention, but not by name."""


def tokens(n=7):
    return torch.randn(3, n, SIZE, dtype=torch.float64)


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
    LoopAttention: "inside of a loop",
    TransposedInPlaceAttention: "in place",
    PartZeroAttention: "in place",
    ViewZeroAttention: "in place",
    OffByOneAttention: "neither is torch's nor",
    PrivateAttention: "neither is torch's nor",
    WrappedAttention: "neither is torch's nor",
    Mixer: "No attention was found at all",
}


def sinkhorn_by_hand(layer, x, n_iters, scores=lambda scores: scores):
    query, key, value = layer.heads(x)
    return sinkhorn(scores(query @ key.mT), n_iters=n_iters) @ value


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


class SdpaAttention(Heads):
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.heads(x))


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


def test_code_that_is_not_in_its_file_is_not_converted():
    changed = type("ChangedAttention", (PlainAttention,), {})
    namespace = {}
    exec("def forward(self, x):\n    return (x @ x.mT).softmax(-1) @ x", namespace)
    changed.forward = namespace["forward"]
    with pytest.raises(ValueError, match=r"ChangedAttention.*neither is torch's nor"):
        to_sinkformer(changed())


SOURCE = """
import torch
from torch import nn

class FileAttention(nn.Module):
    def forward(self, x):
        return (2.0 * x @ x.mT).softmax(-1) @ x
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A module of Python in a file, which can be changed."""
    path = tmp_path / "attention_in_a_file.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield path, importlib.import_module("attention_in_a_file")
    sys.modules.pop("attention_in_a_file")


def test_a_file_that_was_changed_is_not_read(file):
    path, module = file
    layer = to_sinkformer(module.FileAttention())
    path.write_text(SOURCE.replace("2.0", "99.0"))
    to_transformer(layer)
    with pytest.raises(ValueError, match="neither is torch's nor"):
        to_sinkformer(layer)


def test_methods_that_are_replaced_are_read_again(file):
    _, module = file
    to_sinkformer(module.FileAttention())
    module.FileAttention.forward = twice(module.FileAttention.forward)
    with pytest.raises(ValueError, match="neither is torch's nor"):
        to_sinkformer(module.FileAttention())


def test_a_pickle_does_not_meet_other_code(file):
    path, module = file
    pickled = pickle.dumps(to_sinkformer(module.FileAttention()))
    assert isinstance(pickle.loads(pickled), module.FileAttention)
    path.write_text(SOURCE.replace("2.0 * x @ x.mT", "(2.0 * x) @ (x + 1).mT + 3"))
    importlib.invalidate_caches()
    importlib.reload(module)
    with pytest.raises(RuntimeError, match="the code of FileAttention is not the code that was converted"):
        pickle.loads(pickled)


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


class ReducingAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key[..., ::2, :].mT).softmax(-1) @ value[..., ::2, :]


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


class ReshapedAttention(Heads):
    """Weights are viewed in another shape before they are used, which the code does not show."""

    def forward(self, x):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1).view(3, 2, 2, 18)
        return weights @ value.repeat(1, 1, 3, 1)


def test_weights_that_are_used_in_another_shape_raise():
    layer, x = ReshapedAttention(), tokens(6)
    layer(x)
    with pytest.raises(RuntimeError, match=r"multiplies values with weights of shape.*Sinkhorn made them for 6 tokens"):
        to_sinkformer(layer, 3)(x)


def test_learned_tau_needs_heads_in_an_axis_of_their_own():
    layer = to_sinkformer(MergedAttention(), 3, tau="learned")
    with pytest.raises(NotImplementedError, match=r'tau="learned" has one value per head.*Pass a number'):
        layer(tokens())
