"""Small attention layers that compute SoftMax themselves, as attention does."""

import torch
import torch.nn.functional as F
from torch import nn

from sinkformers import sinkhorn

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


class MergedMaskAttention(Heads):
    """Batch and heads in one axis, with a mask."""

    def forward(self, x, mask=None):
        query, key, value = (each.flatten(0, 1) for each in self.heads(x))
        scores = torch.bmm(query, key.transpose(1, 2))
        if mask is not None:
            scores = scores + mask.expand(-1, 2, -1, -1).flatten(0, 1)
        return (scores.softmax(-1) @ value).unflatten(0, (-1, 2))


class TransposedAttention(Heads):
    """Values on the left, as in convolutional models."""

    def forward(self, x):
        query, key, value = self.heads(x)
        weights = F.softmax(query @ key.mT, dim=3)
        return (value.mT @ weights.transpose(-1, -2)).mT


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


class PositionalAttention(Heads):
    """Arguments by position only, and a decorator."""

    @torch.no_grad()
    def forward(self, x, /):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-1, torch.float64) @ value


class EncoderOutputAttention(Heads):
    def forward(self, x, encoder_output=None):
        other = x if encoder_output is None else encoder_output
        return (self.heads(x)[0] @ self.heads(other)[1].mT).softmax(-1) @ self.heads(other)[2]


class SingleAttention(Heads):
    """SoftMax in single precision, which is given by position."""

    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key.mT).softmax(-1, torch.float32).to(value.dtype) @ value


class SdpaAttention(Heads):
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.heads(x))


class ReducingAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        return (query @ key[..., ::2, :].mT).softmax(-1) @ value[..., ::2, :]


class ReshapedAttention(Heads):
    """Weights are viewed in another shape before they are used, which the code does not show."""

    def forward(self, x):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1).view(3, 2, 2, 18)
        return weights @ value.repeat(1, 1, 3, 1)


class MaskedAfterAttention(Heads):
    """Weights are masked after SoftMax, by one of the ways that code has for it, if there is a mask."""

    def forward(self, x, mask=None):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1)
        if mask is not None:
            weights = weights * mask
        return weights @ value


class FilledAfterAttention(Heads):
    def forward(self, x, mask=None):
        query, key, value = self.heads(x)
        scores = query @ key.mT
        if mask is None:
            mask = torch.ones_like(scores)
        else:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return torch.softmax(scores, -1).masked_fill(mask == 0, 0.0) @ value


class FilledOnlyAfterAttention(Heads):
    def forward(self, x, mask):
        query, key, value = self.heads(x)
        return torch.masked_fill(torch.softmax(query @ key.mT, -1), mask == 0, 0.0) @ value


class MixedHeadsAttention(Heads):
    """The weights of heads are mixed, on request."""

    def forward(self, x, mix=None):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1)
        if mix is not None:
            weights = (weights.permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2)
        return weights @ value


class ClampedAttention(Heads):
    def forward(self, x, lowest=None):
        query, key, value = self.heads(x)
        weights = (query @ key.mT).softmax(-1)
        if lowest is not None:
            weights = weights.clamp(min=lowest)
        return weights @ value


class FeatureAttention(Heads):
    """Features attend to features, over all tokens."""

    def forward(self, x):
        query, key, value = (each.mT for each in self.heads(x))
        return ((query @ key.mT).softmax(-1) @ value).mT


class FeatureEinsumAttention(Heads):
    def forward(self, x):
        query, key, value = self.heads(x)
        weights = torch.einsum("bhnd,bhne->bhde", query, key).softmax(dim=-1)
        return torch.einsum("bhde,bhne->bhnd", weights, value)


class AmongHeadsAttention(Heads):
    """The heads of a token attend to each other."""

    def forward(self, x):
        query, key, value = (each.transpose(1, 2) for each in self.heads(x))
        return (query @ key.mT).softmax(-1) @ value


def sinkhorn_by_hand(layer, x, n_iters, scores=lambda scores: scores):
    query, key, value = layer.heads(x)
    return sinkhorn(scores(query @ key.mT), n_iters=n_iters) @ value


def tokens(n=7):
    return torch.randn(3, n, SIZE, dtype=torch.float64)
