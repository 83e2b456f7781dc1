"""Small layers that are named for attention and compute SoftMax otherwise, so that they are left alone."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from tests.conversion.inline_layers import SIZE, Heads, PlainAttention


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


class TriangleAttention(PlainAttention):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.ones(1, 1, 7, 7).tril())


class Mixer(PlainAttention):
    """Attention, but not by name."""


class AddedInPlaceAttention(Heads):
    def forward(self, x, mask=None):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1)
        if mask is not None:
            weights *= mask
        return weights @ value


class AveragedAttention(Heads):
    def forward(self, x, average=False):
        query, key, value = self.heads(x)
        weights, other = (query @ key.mT).softmax(-1), (key @ query.mT).softmax(-1)
        if average:
            weights = (weights + other) / 2
        return weights @ value + other @ value


class FusedAttention(Heads):
    """SDPA where it is available, as in many models."""

    def forward(self, x):
        query, key, value = self.heads(x)
        if hasattr(F, "scaled_dot_product_attention"):
            return self.fused(query, key, value)
        return (query @ key.mT).softmax(-1) @ value

    def fused(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, scale=1.0)


def attend(query, key, value):
    return (query @ key.mT).softmax(-1) @ value


def attend_fused(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, scale=1.0)


class HelperAttention(Heads):
    """A SoftMax in `forward`, and another one in a function that it calls."""

    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-1) @ value + attend(query, key, value)


class SecondMethodAttention(Heads):
    """A SoftMax in `forward`, and another one in a method of a method."""

    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-1) @ value + self.first(query, key, value)

    def first(self, *heads):
        return self.second(*heads)

    def second(self, query, key, value):
        return torch.softmax(query @ key.mT, -1) @ value


class FusedHelperAttention(Heads):
    """SDPA for some sizes, in a function that is called."""

    def forward(self, x):
        query, key, value = self.heads(x)
        return attend_fused(query, key, value) if x.shape[1] > 64 else (query @ key.mT).softmax(-1) @ value


class NormalisedHalvesAttention(Heads):
    """The first half of the tokens attends to the second."""

    def forward(self, x):
        one, two = F.dropout(x * 2.0, 0.0).chunk(2, 1)
        return (self.heads(one)[0] @ self.heads(two)[1].mT).softmax(-1) @ self.heads(two)[2]


class PairsAttention(Heads):
    """Two texts in one tensor, of which the first attends to the second."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(SIZE, dtype=torch.float64)

    def forward(self, x):
        x = self.norm(x).view(x.shape[0], 2, -1, SIZE).transpose(0, 1)
        return (self.heads(x[0])[0] @ self.heads(x[1])[1].mT).softmax(-1) @ self.heads(x[1])[2]


class InnerFunctionAttention(Heads):
    def forward(self, x, states):
        query, key, value = self.heads(x)

        def attend(query, key, value):
            return (query @ key.mT).softmax(-1) @ value

        return attend(query, key, value) + attend(query, *self.heads(states)[1:])


class ChannelAttention(Heads):
    """Named for what it does; with as many tokens as channels, nothing else tells."""

    def forward(self, x):
        query, key, value = (each.mT for each in self.heads(x))
        return ((query @ key.mT).softmax(-1) @ value).mT


class UnprojectedAttention(nn.Module):
    """Attention among the channels of an image (batch, channels, pixels), or among tokens of another input."""

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class SpecialAttention(Heads):
    """Another SoftMax, which gates, by its third name."""

    def forward(self, x):
        query, key, value = self.heads(x)
        return ((query @ key.mT).softmax(-1) @ value) * torch.special.softmax(value, -1)


class AmongUnnamedHeadsAttention(nn.Module):
    """The heads of a token attend to each other, and the module does not say how many there are."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        query, key = (each(x).unflatten(-1, (2, -1)) for each in (self.query, self.key))
        return (query @ key.mT).softmax(-1) @ key
