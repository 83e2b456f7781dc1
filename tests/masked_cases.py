"""Calls with masked tokens, one or more for every mask argument of every public name.

A case builds a module, calls it with tokens whose masked entries were replaced by `fill`, and returns the valid part of
the output and the tensors whose gradients count.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import sinkformers
from sinkformers import attention, models, modules
from sinkformers.modules import ISAB, MAB, PMA, SAB

VALID = torch.arange(7) < torch.tensor([[7], [4], [1]])
OTHER = torch.arange(5) < torch.tensor([[2], [5], [3]])
ENTRIES = VALID[:, :, None] & OTHER[:, None, :]
TEXT = {"dim": 8, "depth": 2, "heads": 2, "hidden": 11, "length": 9}

Fill = Callable[[Tensor, Tensor], Tensor]
Case = Callable[[Fill, int, float], tuple[Tensor, list[Tensor]]]
CASES: dict[str, tuple[str, tuple[str, ...], Case]] = {}


def case(name: str, *arguments: str) -> Callable[[Case], Case]:
    """Register a case of a public name, for these of its mask arguments."""

    def register(function: Case) -> Case:
        CASES[function.__name__] = name, arguments, function
        return function

    return register


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


def of(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    return [*inputs, *module.parameters()]


# Functions


@case("sinkhorn", "mask")
def operator(fill, n_iters, _dropout):
    scores = fill(rand(3, 7, 5), ENTRIES)
    return sinkformers.sinkhorn(scores, n_iters=n_iters, mask=ENTRIES), [scores]


@case("causal_sinkhorn", "mask")
def causal_operator(fill, n_iters, _dropout):
    """Of any shape by the streaming definition; square ones by the other, for tokens masked on both sides."""
    n_iters += 1 - n_iters % 2
    scores, tokens = fill(rand(3, 7, 5), ENTRIES), VALID[:, :, None] & VALID[:, None, :]
    square = fill(rand(3, 7, 7), tokens)
    streaming = sinkformers.causal_sinkhorn(scores, n_iters=n_iters, mask=ENTRIES)
    prefix = sinkformers.causal_sinkhorn(square, n_iters=n_iters, mask=tokens.tril(), definition="prefix")
    return torch.cat([streaming.flatten(), prefix.flatten()]), [scores, square]


@case("sinkhorn_limit", "mask")
def operator_limit(fill, _n_iters, _dropout):
    scores = fill(rand(3, 7, 5), ENTRIES)
    return sinkformers.sinkhorn_limit(scores, mask=ENTRIES), [scores]


@case("marginal_error", "mask")
def error_of_marginals(fill, _n_iters, _dropout):
    weights = fill(torch.rand(3, 7, 5), ENTRIES)
    return torch.stack(sinkformers.marginal_error(weights, ENTRIES)), [weights]


@case("sinkhorn_attention", "query_mask", "key_mask")
def attention_with_token_masks(fill, n_iters, dropout):
    query, key, value = fill(rand(3, 7, 4), VALID), fill(rand(3, 5, 4), OTHER), fill(rand(3, 5, 6), OTHER)
    masks = {"query_mask": VALID, "key_mask": OTHER}
    out = sinkformers.sinkhorn_attention(query, key, value, dropout_p=dropout, n_iters=n_iters, **masks)
    return out, [query, key, value]


@case("sinkhorn_attention", "attn_mask")
def attention_with_a_matrix(fill, n_iters, dropout):
    query, key, value = fill(rand(3, 7, 4), VALID), fill(rand(3, 5, 4), OTHER), fill(rand(3, 5, 6), OTHER)
    return sinkformers.sinkhorn_attention(query, key, value, ENTRIES, dropout, n_iters=n_iters), [query, key, value]


@case("sinkhorn_attention", "query_mask", "key_mask", "attn_mask")
def causal_attention(fill, n_iters, dropout):
    """Both definitions; keys that are masked, and queries that see none, on either side."""
    n_iters, out, sources = n_iters + 1 - n_iters % 2, [], []
    for valid in (VALID, VALID.flip(1)):
        inputs = [fill(rand(3, 7, size), valid) for size in (4, 4, 6)]
        for causal in ("streaming", "prefix"):
            options = {"dropout_p": dropout, "n_iters": n_iters, "causal": causal}
            masks = {"query_mask": valid, "key_mask": valid}
            out.append(sinkformers.sinkhorn_attention(*inputs, is_causal=True, **masks, **options))
            entries = (valid[:, :, None] & valid[:, None, :]).tril()
            out.append(sinkformers.sinkhorn_attention(*inputs, entries, **options))
        sources += inputs
    return torch.stack(out), sources


@case("attention_with_weights", "attn_mask", "query_mask", "key_mask")
def attention_and_weights(fill, n_iters, dropout):
    query, key, value = fill(rand(3, 7, 4), VALID), fill(rand(3, 5, 4), OTHER), fill(rand(3, 5, 6), OTHER)
    out = []
    for masks in ({"attn_mask": ENTRIES}, {"query_mask": VALID, "key_mask": OTHER}):
        out += attention.attention_with_weights(query, key, value, dropout_p=dropout, n_iters=n_iters, **masks)
    return torch.cat([part.flatten() for part in out]), [query, key, value]


# Modules


@case("Sinkhorn", "mask")
def operator_module(fill, _n_iters, _dropout):
    layer, scores = sinkformers.Sinkhorn(3, tau=nn.Parameter(torch.tensor(0.7))), fill(rand(3, 7, 5), ENTRIES)
    return layer(scores, ENTRIES), of(layer, scores)


@case("SelfAttention", "mask")
def self_attention(fill, n_iters, dropout):
    layer, x = modules.SelfAttention(6, 2, n_iters=n_iters, bias=True, dropout=dropout), fill(rand(3, 7, 6), VALID)
    return layer(x, VALID)[VALID], of(layer, x)


@case("SelfAttention", "mask")
def self_attention_read_everywhere(fill, n_iters, _dropout):
    """The output at masked tokens is finite, and does not depend on their contents."""
    layer, x = modules.SelfAttention(6, 2, n_iters=n_iters, tie_qk=True), fill(rand(3, 7, 6), VALID)
    return layer(x, VALID), of(layer, x)


@case("MAB", "query_mask", "key_mask")
def attention_block(fill, n_iters, _dropout):
    layer, x, y = MAB(3, 4, 6, 2, n_iters=n_iters), fill(rand(3, 7, 3), VALID), fill(rand(3, 5, 4), OTHER)
    return layer(x, y, VALID, OTHER)[VALID], of(layer, x, y)


@case("MAB", "query_mask", "key_mask")
def attention_block_without_norms(fill, n_iters, _dropout):
    layer, x = MAB(3, 3, 6, 2, n_iters=n_iters, norm=False), fill(rand(3, 7, 3), VALID)
    return layer(x, x, VALID, VALID), of(layer, x)


@case("SAB", "mask")
def self_attention_block(fill, n_iters, _dropout):
    layer, x = SAB(3, 6, 2, n_iters=n_iters), fill(rand(3, 7, 3), VALID)
    return layer(x, VALID)[VALID], of(layer, x)


@case("ISAB", "mask")
def induced_block(fill, n_iters, _dropout):
    layer, x = ISAB(3, 6, 2, 4, n_iters=n_iters), fill(rand(3, 7, 3), VALID)
    return layer(x, VALID)[VALID], of(layer, x)


@case("PMA", "mask")
def pooling_block(fill, n_iters, _dropout):
    layer, x = PMA(6, 2, 3, n_iters=n_iters), fill(rand(3, 7, 6), VALID)
    return layer(x, VALID), of(layer, x)


@case("PMA", "mask")
def pooling_block_with_one_seed(fill, n_iters, _dropout):
    layer, x = PMA(6, 2, n_iters=n_iters), fill(rand(3, 7, 6), VALID)
    return layer(x, VALID), of(layer, x)


def invertible(n_iters: int) -> modules.InvertibleAttention:
    return modules.InvertibleAttention(6, 2, n_iters=math.inf if n_iters == 2 else n_iters)


@case("InvertibleAttention", "mask")
def invertible_layer(fill, n_iters, _dropout):
    layer, x = invertible(n_iters), fill(rand(3, 7, 6), VALID)
    return layer(x, VALID)[VALID], of(layer, x)


@case("InvertibleAttention.inverse", "mask")
def invertible_layer_inverted(fill, n_iters, _dropout):
    return invertible(n_iters).inverse(fill(rand(3, 7, 6), VALID), VALID)[VALID], []


@case("InvertibleAttention.local_norm", "mask")
def invertible_layer_measured(fill, n_iters, _dropout):
    return invertible(n_iters).local_norm(fill(rand(3, 7, 6), VALID), VALID), []


@case("EquilibriumAttention", "mask")
def equilibrium_layer(fill, _n_iters, _dropout):
    layer, z = modules.EquilibriumAttention(6, 2), fill(rand(3, 7, 6), VALID)
    return layer(z, VALID)[VALID], of(layer, z)


def multihead(n_iters: int, dropout: float, **options) -> sinkformers.MultiheadAttention:
    return sinkformers.MultiheadAttention(8, 2, n_iters=n_iters, dropout=dropout, batch_first=True, **options)


def as_float(ignored: Tensor) -> Tensor:
    return torch.zeros(ignored.shape).masked_fill(ignored, -torch.inf)


@case("MultiheadAttention", "key_padding_mask")
def multihead_self_attention(fill, n_iters, dropout):
    layer, x, out = multihead(n_iters, dropout), fill(rand(3, 7, 8), VALID), []
    for padding in (~VALID, as_float(~VALID)):
        out += [layer(x, x, x, padding, need_weights)[0][VALID] for need_weights in (True, False)]
    return torch.stack(out), of(layer, x)


@case("MultiheadAttention", "key_padding_mask", "query_padding_mask")
def multihead_cross_attention(fill, n_iters, dropout):
    """Query, key and value are three tensors, with projections of their own."""
    layer = multihead(n_iters, dropout, kdim=4, vdim=6, add_bias_kv=True, add_zero_attn=True)
    query, key, value = fill(rand(3, 7, 8), VALID), fill(rand(3, 5, 4), OTHER), fill(rand(3, 5, 6), OTHER)
    options = {"key_padding_mask": ~OTHER, "query_padding_mask": ~VALID}
    out = [layer(query, key, value, need_weights=need, **options)[0] for need in (True, False)]
    return torch.stack(out), of(layer, query, key, value)


@case("MultiheadAttention", "key_padding_mask", "query_padding_mask")
def multihead_with_another_query(fill, n_iters, dropout):
    """Query, key and value are different tensors."""
    layer = multihead(n_iters, dropout)
    query, key, value = (fill(rand(3, 7, 8), VALID) for _ in range(3))
    options = {"key_padding_mask": ~VALID, "query_padding_mask": ~VALID}
    out = [layer(query, key, value, need_weights=need, **options)[0] for need in (True, False)]
    return torch.stack(out), of(layer, query, key, value)


@case("MultiheadAttention", "attn_mask")
def multihead_with_a_matrix(fill, n_iters, dropout):
    """Tokens that are masked in every head by the rows or columns of a matrix."""
    layer, out = multihead(n_iters, dropout), []
    query, key, value = fill(rand(3, 7, 8), VALID), fill(rand(3, 5, 8), OTHER), fill(rand(3, 5, 8), OTHER)
    for mask in (~ENTRIES, as_float(~ENTRIES)):
        each_head = mask.repeat_interleave(2, 0)
        for need in (True, False):
            out.append(layer(query, key, value, attn_mask=each_head, need_weights=need)[0])
    return torch.stack(out), of(layer, query, key, value)


@case("MultiheadAttention", "attn_mask", "key_padding_mask")
def multihead_with_a_matrix_and_padding(fill, n_iters, dropout):
    """A matrix for all samples, whose rows allow a single key each; if that is padding, the query is masked too."""
    looks = torch.eye(5, dtype=torch.bool)
    layer, x = multihead(n_iters, dropout), fill(rand(3, 5, 8), OTHER)
    y, padding = fill(rand(3, 5, 8), OTHER), as_float(~OTHER)
    matrices = (~looks, as_float(~looks))
    out = [layer(x, y, y, padding, need, matrix)[0] for need in (True, False) for matrix in matrices]
    return torch.stack(out), of(layer, x, y)


# Models


@case("SetTransformer", "mask")
def set_transformer(fill, n_iters, dropout):
    model = models.SetTransformer(classes=4, dim=8, heads=2, inducing=3, dropout=dropout, n_iters=n_iters)
    x = fill(rand(3, 7, 3), VALID)
    return model(x, VALID), of(model, x)


def text_encoder(norm: str, fill: Fill, n_iters: int, dropout: float) -> tuple[Tensor, list[Tensor]]:
    options = {"norm": norm, "positions": "learned", "n_iters": n_iters, "dropout": dropout}
    model = models.TextEncoder(vocabulary=11, classes=3, **TEXT, **options)
    return model(fill(torch.randint(11, (3, 7)), VALID), VALID), of(model)


@case("TextEncoder", "mask")
def text_encoder_with_norms_after(fill, n_iters, dropout):
    return text_encoder("post", fill, n_iters, dropout)


@case("TextEncoder", "mask")
def text_encoder_with_norms_before(fill, n_iters, dropout):
    return text_encoder("pre", fill, n_iters, dropout)


@case("TextEncoder", "mask")
def text_encoder_with_a_broken_embedding(fill, n_iters, dropout):
    """Token 0, which occurs in the padding only, may have any embedding."""
    model = models.TextEncoder(vocabulary=11, classes=3, **TEXT, n_iters=n_iters, dropout=dropout)
    with torch.no_grad():
        model.embed.weight[0] = fill(rand(1, 8), torch.zeros(1, dtype=torch.bool))
    tokens = torch.randint(4, 11, (3, 7)).masked_fill(~VALID, 0)
    return model(tokens, VALID), of(model)


@case("TextEncoder.pool", "mask")
def pooled_text(fill, _n_iters, _dropout):
    model, x = models.TextEncoder(vocabulary=11, classes=3, **TEXT), fill(rand(3, 7, 8), VALID)
    return model.pool(x, VALID), [x]


def translator(n_iters: int, dropout: float, norm: str = "post") -> models.TranslationTransformer:
    options = {"norm": norm, "n_iters": n_iters, "dropout": dropout}
    return models.TranslationTransformer(source_vocabulary=11, target_vocabulary=13, **TEXT, **options)


@case("TranslationTransformer", "mask")
def translation(fill, n_iters, dropout):
    model, source = translator(n_iters, dropout), fill(torch.randint(11, (3, 7)), VALID)
    return model(source, VALID, torch.randint(13, (3, 5))), of(model)


@case("TranslationTransformer.begin", "mask")
def translation_token_by_token(fill, n_iters, dropout):
    model, source = translator(n_iters, dropout, "pre"), fill(torch.randint(11, (3, 7)), VALID)
    state, target, out = model.begin(source, VALID), torch.randint(13, (3, 2)), []
    for token in target.split(1, 1):
        logits, state = model.follow(token, state)
        out.append(logits)
    return torch.cat(out, 1), of(model)


@case("beam_search", "mask")
def translation_by_beam_search(fill, n_iters, _dropout):
    model, source = translator(n_iters, 0.0), fill(torch.randint(11, (3, 7)), VALID)
    found = models.beam_search(model, source, VALID, begin=1, end=2, limits=torch.tensor([5, 6, 7]), beam=3)
    return torch.tensor([[each.score, *each.tokens, *[0] * (9 - len(each.tokens))] for each in found]), []
