"""Causal attention in modules: no look at later tokens, the cache, the definitions, and settings that are refused."""

import math

import pytest
import torch
from torch import nn

from sinkformers import MultiheadAttention, SinkhornCache, causal_sinkhorn
from sinkformers.modules import SelfAttention
from sinkformers.modules.rotary import rotated
from tests.rounding import rounding

EXACT = rounding(4096, size=2)
N = 7
TRIANGLE = torch.ones(N, N, dtype=torch.bool).tril()
CAUSAL = ["streaming", "prefix"]


def layer(**options):
    torch.manual_seed(0)
    return SelfAttention(12, 3, **{"causal": "streaming", **options}).double()


def tokens(batch=2, n=N):
    return torch.randn(batch, n, 12, dtype=torch.float64)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("tau", [1.0, "learned"])
def test_self_attention_has_the_weights_of_its_definition(causal, tau):
    module, x = layer(n_iters=3, causal=causal, tau=tau), tokens()
    query, key, value = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in module.project(x).chunk(3, -1))
    number = 1.0 if tau == 1.0 else torch.full((3,), 0.5, dtype=torch.float64)  # the sigmoid of 0
    weights = causal_sinkhorn(query @ key.mT / 2, n_iters=3, tau=number, definition=causal)
    expected = module.out((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected, **EXACT)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("rotary", [False, True])
def test_no_output_depends_on_a_later_token(causal, rotary):
    module, x = layer(causal=causal, rotary=rotary), tokens().requires_grad_()
    for place in range(N):
        gradient = torch.autograd.grad(module(x)[:, place].sum(), x)[0]
        assert gradient[:, place + 1 :].eq(0).all()
        assert gradient[:, : place + 1].abs().sum((0, 2)).gt(0).all()


def test_one_iteration_is_causal_softmax():
    module, x = layer(n_iters=1, causal="prefix"), tokens()
    query, key, value = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in module.project(x).chunk(3, -1))
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(module(x), module.out(attended.transpose(1, 2).flatten(2)), **EXACT)
    assert module.state_dict().keys() == SelfAttention(12, 3).state_dict().keys()


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("n_iters", [1, 3, 5])
@pytest.mark.parametrize("parts", [(1,) * N, (3, 4), (5, 1, 1)])
def test_parts_with_a_cache_equal_the_whole(n_iters, rotary, parts):
    module, x, cache = layer(n_iters=n_iters, rotary=rotary), tokens(), SinkhornCache()
    outputs = [module(part, cache=cache[0]) for part in x.split(parts, 1)]
    torch.testing.assert_close(torch.cat(outputs, 1), module(x), **EXACT)
    assert len(cache[0]) == N


def test_masking_equals_deletion():
    module, x = layer(rotary=False), tokens()
    valid = torch.tensor([True, False, True, True, False, True, True])
    out = module(x.masked_fill(~valid[:, None], torch.nan), valid.expand(2, N))
    torch.testing.assert_close(out[:, valid], module(x[:, valid]), **EXACT)


def test_rotary_scores_depend_on_distances():
    """In one plane, the dot product of two rotated points is that of the first with the second, turned back."""
    query, key = torch.randn(2, 1, 2, dtype=torch.float64).unbind()
    for i, j in ((0, 0), (3, 1), (40, 2)):
        turn = (i - j) * 1.0  # the first rate is 1
        back = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]], dtype=torch.float64)
        expected = key @ back @ query.mT
        torch.testing.assert_close(rotated(query, i) @ rotated(key, j).mT, expected, **EXACT)
    with pytest.raises(ValueError, match=r"rotary positions rotate pairs of features.*even size; got 3"):
        SelfAttention(9, 3, rotary=True)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_in_order(causal, need_weights):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    ours = MultiheadAttention(12, 3, batch_first=True, causal=causal).double()
    ours.load_state_dict(theirs.state_dict())
    x = tokens()
    query, key, value = nn.functional.linear(x, ours.in_proj_weight, ours.in_proj_bias).chunk(3, -1)
    query, key, value = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in (query, key, value))
    expected = causal_sinkhorn(query @ key.mT / 2, definition=causal)
    options = {"attn_mask": ~TRIANGLE, "is_causal": True, "need_weights": need_weights}
    out, weights = ours(x, x, x, average_attn_weights=False, **options)
    torch.testing.assert_close(out, ours.out_proj((expected @ value).transpose(1, 2).flatten(2)), **EXACT)
    if need_weights:
        torch.testing.assert_close(weights, expected, **EXACT)
    ours.n_iters = 1
    torch.testing.assert_close(ours(x, x, x, **options)[0], theirs(x, x, x, **options)[0], **EXACT)


@pytest.mark.parametrize("need_weights", [True, False])
def test_cross_attention_of_a_decoder_layer_is_causal(need_weights):
    """torch's decoder layer with both attentions replaced: no position of the target depends on a later one."""
    torch.manual_seed(2)
    decoder = nn.TransformerDecoderLayer(12, 3, 16, dropout=0.0, batch_first=True).double()
    for name in ("self_attn", "multihead_attn"):
        ours = MultiheadAttention(12, 3, batch_first=True, causal="streaming").double()
        ours.load_state_dict(getattr(decoder, name).state_dict())
        setattr(decoder, name, ours)
    target, memory = tokens().requires_grad_(), tokens(n=5)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    for place in range(N):
        out = decoder(target, memory, tgt_mask=~TRIANGLE, tgt_is_causal=True, memory_key_padding_mask=padding)
        gradient = torch.autograd.grad(out[:, place].sum(), target)[0]
        assert gradient[:, place + 1 :].eq(0).all()
    cross = decoder.multihead_attn
    out, weights = cross(target, memory, memory, key_padding_mask=padding, need_weights=need_weights)
    part, first = cross(target[:, :4], memory, memory, key_padding_mask=padding, need_weights=need_weights)
    torch.testing.assert_close(out[:, :4], part, **EXACT)
    if need_weights:
        torch.testing.assert_close(weights[:, :4], first, **EXACT)


REFUSED = [
    (lambda: SelfAttention(8, 2, causal="stream"), r"SelfAttention: causal must be one of 'streaming', 'prefix'; got"),
    (
        lambda: SelfAttention(8, 2, n_iters=4, causal="streaming"),
        r"SelfAttention: causal attention needs an odd",
    ),
    (lambda: MultiheadAttention(8, 2, n_iters=math.inf, causal="prefix"), r"MultiheadAttention: causal .* got inf"),
    (lambda: MultiheadAttention(8, 2, causal=True), r"MultiheadAttention: causal must be one of"),
    (lambda: SelfAttention(8, 2)(torch.ones(1, 3, 8), cache=SinkhornCache()[0]), r"a cache is for causal attention"),
    (
        lambda: SelfAttention(8, 2, causal="streaming")(
            torch.ones(1, 3, 8), torch.ones(1, 3, dtype=torch.bool), cache=SinkhornCache()[0]
        ),
        r"pass a mask or a cache, not both",
    ),
]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padding", [None, torch.zeros(2, N, dtype=torch.bool), torch.zeros(2, N)])
def test_prefixes_without_a_mask_are_refused(padding, need_weights):
    """Padding does not order the tokens: every query would see all of them."""
    module, x = MultiheadAttention(12, 3, batch_first=True, causal="prefix"), tokens().float()
    with pytest.raises(ValueError, match=r'causal="prefix" needs is_causal=True or an attn_mask'):
        module(x, x, x, key_padding_mask=padding, need_weights=need_weights)


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
