"""`to_sinkformer(…, causal="streaming")`: settings, verdicts and torch's own decoders."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from tests.conversion.torch_encoders import EXACT

N, M = 7, 5


def decoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(12, 3, 16, dropout=0.0, batch_first=True, **options)
    return nn.TransformerDecoder(layer, 2).double()


def tokens():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, n, 12, dtype=torch.float64, generator=generator) for n in (N, M))


def triangle(n=N):
    return nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64)


def by_definition(scores):
    """Return the streaming weights at n_iters=3: a loop over queries that shares no code with the library."""
    rows, received, expected = [], 0.0, 0.0
    for i in range(scores.shape[-2]):
        visible = scores[..., i, :].isfinite().double()
        row = (scores[..., i, :] - scores[..., i, :].amax(-1, keepdim=True)).exp()
        received = received + row / row.sum(-1, keepdim=True)
        expected = expected + visible / visible.sum(-1, keepdim=True)
        balanced = torch.where(visible > 0, row * expected / received, 0.0)
        rows.append(balanced / balanced.sum(-1, keepdim=True))
    return torch.stack(rows, -2)


def attention(module, query, memory, bias):
    """Return the output of converted attention (batch, n, dim), computed from the module's parameters."""
    projected = [
        nn.functional.linear(x, w, b).unflatten(-1, (3, 4)).transpose(1, 2)
        for x, w, b in zip(
            (query, memory, memory), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True
        )
    ]
    scores = projected[0] @ projected[1].mT / 2 + bias
    weights = by_definition(scores)
    return module.out_proj((weights @ projected[2]).transpose(1, 2).flatten(2)), weights


def test_a_decoder_stays_softmax_and_the_report_says_how_to_ask():
    with pytest.raises(ValueError, match=r'(?s)causal: a column sum.*causal="streaming".*cross-attention.*"streaming"'):
        to_sinkformer(decoder())


@pytest.mark.parametrize("norm_first", [True, False])
def test_at_one_iteration_a_converted_decoder_is_the_original(norm_first):
    model = decoder(norm_first=norm_first)
    target, memory = tokens()
    hidden = torch.arange(N) >= torch.tensor([[N], [4]])
    options = {"tgt_mask": triangle(), "tgt_key_padding_mask": hidden.double().masked_fill(hidden, -torch.inf)}
    before = model(target, memory, **options)[~hidden]
    to_sinkformer(model, 1, causal="streaming")
    assert_close(model(target, memory, **options)[~hidden], before, atol=EXACT, rtol=0)
    to_transformer(model)
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    assert model(target, memory, **options)[~hidden].equal(before)


def test_both_attentions_follow_the_definition():
    model = to_sinkformer(decoder(), 3, causal="streaming")
    target, memory = tokens()
    layer = model.layers[0]
    for module, keys, mask in ((layer.self_attn, target, triangle()), (layer.multihead_attn, memory, None)):
        expected, weights = attention(module, target, keys, 0.0 if mask is None else mask)
        out, found = module(target, keys, keys, attn_mask=mask, need_weights=True, average_attn_weights=False)
        assert_close(out, expected, atol=EXACT, rtol=0)
        assert_close(found, weights, atol=EXACT, rtol=0)
        assert_close(module(target, keys, keys, attn_mask=mask, need_weights=False)[0], expected, atol=EXACT, rtol=0)


def test_no_output_depends_on_a_later_target():
    model = to_sinkformer(decoder(), 3, causal="streaming")
    target, memory = tokens()
    target.requires_grad_()
    for is_causal in (True, False):
        out = model(target, memory, tgt_mask=triangle(), tgt_is_causal=is_causal)
        for i in range(N):
            (found,) = torch.autograd.grad(out[:, i].square().sum(), target, retain_graph=True)
            assert found[:, i + 1 :].count_nonzero() == 0
            assert found[:, : i + 1].abs().amax((0, 2)).min() > 1e-9


def test_settings_are_kept_shown_and_checked():
    model = to_sinkformer(decoder(), 3, causal="streaming")
    assert len(model.sinkformer_report.converted) == 4
    assert "Sinkhorn (torch.nn), causal: streaming" in str(model.sinkformer_report)
    module = model.layers[1].multihead_attn
    assert "n_iters=3, tau=1.0, causal=streaming" in repr(module)
    assert repr(module.sinkhorn) == "Settings(n_iters=3, tau=1.0, causal=streaming)"
    set_n_iters(model, 5)
    set_tau(model, 0.5)
    to_sinkformer(model, 7, tau=0.25)  # keeps the definition
    assert {part.sinkhorn.causal for part in model.modules() if hasattr(part, "sinkhorn")} == {"streaming"}
    for n_iters in (4, math.inf):
        for change in (set_n_iters, to_sinkformer):
            with pytest.raises(ValueError, match=f"{change.__name__}: causal attention needs an odd, finite n_iters"):
                change(model, n_iters)
        assert module.sinkhorn.n_iters == 7
        with pytest.raises(ValueError, match="odd, finite n_iters"):
            to_sinkformer(decoder(), n_iters, causal="streaming")
    copied = copy.deepcopy(model)
    assert copied.layers[0].self_attn.sinkhorn == model.layers[0].self_attn.sinkhorn


@pytest.mark.parametrize(
    ("causal", "error", "message"),
    [
        ("prefix", NotImplementedError, r'to_sinkformer: causal="prefix".*no cache.*"streaming"'),
        ("plain", ValueError, r"to_sinkformer: causal must be one of .*streaming.*got 'plain'"),
        (True, ValueError, r"to_sinkformer: causal must be one of .*got True"),
    ],
)
def test_other_definitions_are_refused(causal, error, message):
    with pytest.raises(error, match=message):
        to_sinkformer(decoder(), causal=causal)


def test_encoders_stay_bidirectional_unless_they_are_selected():
    torch.manual_seed(0)
    model = nn.Transformer(12, 2, 1, 1, 16, dropout=0.0, batch_first=True).double()
    to_sinkformer(model, 3, causal="streaming")
    found = {name: entry.causal for name, entry in model.sinkformer_report.converted.items()}
    assert found == {
        "encoder.layers.0.self_attn": None,
        "decoder.layers.0.self_attn": "streaming",
        "decoder.layers.0.multihead_attn": "streaming",
    }
    x, _ = tokens()
    with pytest.raises(NotImplementedError, match=r'must not order the tokens.*causal="streaming" and a `select`'):
        model.encoder.layers[0].self_attn(x, x, x, attn_mask=triangle())
    to_sinkformer(model, 3, causal="streaming", select="encoder.*")
    x.requires_grad_()
    out = model.encoder(x, mask=triangle())
    assert torch.autograd.grad(out[:, 2].sum(), x)[0][:, 3:].count_nonzero() == 0


def test_watched_column_sums_are_relative_to_uniform_attention():
    model = to_sinkformer(decoder(), 3, causal="streaming")
    layer = model.layers[0]
    with torch.no_grad():
        layer.self_attn.in_proj_weight.zero_()  # uniform attention
    target, memory = tokens()
    with watch_attention(model, select="layers.0.*", keep_weights=True) as watch:
        expected = model(target, memory, tgt_mask=triangle())
    assert_close(model(target, memory, tgt_mask=triangle()), expected, atol=0, rtol=0)
    seen, cross = watch["layers.0.self_attn"].calls[0], watch["layers.0.multihead_attn"].calls[0]
    assert_close(seen.column_sums, torch.ones(2, 3, N, dtype=torch.float64), atol=EXACT, rtol=0)
    assert seen.column_error.max() < EXACT
    shares = torch.ones(N, N, dtype=torch.float64).tril() / torch.arange(1, N + 1)[:, None]
    assert_close(seen.weights, shares.expand(2, 3, N, N), atol=EXACT, rtol=0)
    assert_close(cross.column_sums, cross.weights.sum(-2) * M / N, atol=EXACT, rtol=0)
    assert cross.row_error.max() < EXACT


class CallsAttention(nn.Module):
    """Attention by SDPA, or by a SoftMax of its own in a class that could be vit-pytorch's."""

    def forward(self, x, keys):
        return nn.functional.scaled_dot_product_attention(x, keys, keys, is_causal=x.shape == keys.shape)


class OwnSoftmax(nn.Module):
    __module__ = "vit_pytorch.own_softmax"

    def __init__(self):
        super().__init__()
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x, keys):
        hidden = torch.ones(x.shape[-2], keys.shape[-2], dtype=torch.bool).triu(1)
        return self.attend((x @ keys.mT / 2).masked_fill(hidden, -torch.inf)) @ keys


@pytest.mark.parametrize(("kind", "adapter"), [(CallsAttention, "sdpa"), (OwnSoftmax, None)])
def test_intercepted_calls_are_computed_in_order_where_that_is_known_to_be_right(kind, adapter):
    model = to_sinkformer(kind(), 3, causal="streaming", select="*", adapter=adapter)
    x = torch.randn(2, 3, N, 4, dtype=torch.float64)
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    expected = by_definition((x @ x.mT / 2).masked_fill(hidden, -torch.inf)) @ x
    assert_close(model(x, x), expected, atol=EXACT, rtol=0)
    with watch_attention(model, keep_weights=True) as watch:
        model(x, x)
    assert_close(watch[""].calls[0].weights @ x, expected, atol=EXACT, rtol=0)
    with pytest.raises(
        NotImplementedError, match=r"normalises rows in order, and was called with 1 queries and 7 keys"
    ):
        model(x[..., -1:, :], x)
