"""Converted torch.nn models: the original at one iteration, doubly stochastic at many, no fused SoftMax kernels."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from tests import oracle
from tests.conversion.torch_encoders import EXACT, VALID, agree, distance, encoder, encoder_layer, run


class Own(nn.Module):
    """A user's model that contains `nn.MultiheadAttention`."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x, src_key_padding_mask=None):
        return x + self.attention(x, x, x, key_padding_mask=src_key_padding_mask, need_weights=False)[0]


MODELS = {
    "module": Own,
    "layer": encoder_layer,
    "pre-norm layer": lambda: encoder_layer(norm_first=True),
    "encoder": encoder,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("training", "padded", "grad"), list(itertools.product([True, False], repeat=3)))
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_one_iteration_is_the_original(name, training, padded, grad):
    model = MODELS[name]().train(training)
    before = run(model, padded, grad)
    agree(run(to_sinkformer(model, n_iters=1), padded, grad), before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_fused_kernels_and_nested_tensors_are_not_used(name, padded):
    model = MODELS[name]()
    softmax = run(model, padded)
    to_sinkformer(model, n_iters=5)
    runs = [run(model.train(training), padded, grad) for training in (True, False) for grad in (True, False)]
    for other in runs[1:]:
        assert_close(other[0], runs[0][0], atol=EXACT, rtol=0)
        assert distance(other, softmax) > 1e-4
    assert_close(runs[2][1], runs[0][1], atol=EXACT, rtol=0)


def test_attention_is_sinkhorns():
    module = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    heads = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).unflatten(-1, (3, 2, 3))
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    mask = (VALID[:, None, :] & VALID[:, :, None])[:, None]
    expected = module.out_proj(oracle.attention(query, key, value, 5, tau=0.7, mask=mask).transpose(1, 2).flatten(2))
    to_sinkformer(module, n_iters=5, tau=0.7)
    out, _ = module(x, x, x, key_padding_mask=~VALID)
    assert_close(out, expected, atol=EXACT, rtol=0)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("tau", [1.0, "learned"])
def test_back_to_softmax_with_the_trained_weights(tau):
    model, original = encoder(), encoder()
    keys, identities = list(model.state_dict()), [id(p) for p in model.parameters()]
    types = [type(module) for module in model.modules()]
    to_sinkformer(model, n_iters=3, tau=tau)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 7, 8, dtype=torch.float64)).square().sum().backward()
    optimiser.step()
    to_transformer(model)
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == identities
    assert [type(module) for module in model.modules()] == types
    assert model.use_nested_tensor
    assert not hasattr(model, "sinkformer_report")
    original.load_state_dict(model.state_dict())
    for padded in (True, False):
        agree(run(model, padded), run(original, padded), atol=0.0)
        agree(run(model.eval(), padded, False), run(original.eval(), padded, False), atol=0.0)


def test_parameters_and_the_state_dict_stay_the_same():
    model = encoder()
    state = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    to_sinkformer(model, n_iters=3)
    assert list(state) == [name for name, _ in model.named_parameters()] == list(model.state_dict())
    for name, parameter in model.named_parameters():
        assert state[name][0] == id(parameter)
        assert parameter.equal(state[name][1])
    assert isinstance(model.layers[0].self_attn, nn.MultiheadAttention)


def test_decoders_stay_softmax_and_the_report_says_so():
    model = nn.Transformer(8, 2, 2, 1, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    to_sinkformer(model, n_iters=5)
    report = model.sinkformer_report
    assert list(report.converted) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert "causal" in report.kept["decoder.layers.0.self_attn"]
    assert "cross-attention" in report.kept["decoder.layers.0.multihead_attn"]
    assert "unchanged: causal" in str(report)
    src, tgt = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    out = model(src, tgt, tgt_mask=mask, tgt_is_causal=True)
    assert_close(out, model.decoder(tgt, model.encoder(src), tgt_mask=mask), atol=EXACT, rtol=0)
    changed = tgt.clone()
    changed[:, -1] += 1.0  # a later target changes no earlier output
    assert_close(model(src, changed, tgt_mask=mask)[:, :-1], out[:, :-1], atol=EXACT, rtol=0)


def test_a_decoder_alone_is_refused():
    with pytest.raises(
        ValueError, match=r"(?s)no bidirectional self-attention.*self_attn.*causal.*multihead_attn.*cros"
    ):
        to_sinkformer(nn.TransformerDecoderLayer(8, 2, 16))


def test_causal_masks_in_an_encoder_raise():
    model = to_sinkformer(encoder(), n_iters=3)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="is_causal=True is supported with n_iters=1"):
        model(torch.randn(3, 7, 8, dtype=torch.float64), mask=mask)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("tau", [0.6, "learned"])
def test_copies_are_converted_and_independent(clone, tau):
    model = to_sinkformer(encoder(), 5, tau=tau)
    other = clone(model)
    agree(run(other, True), run(model, True), atol=0.0)
    assert str(other.sinkformer_report) == str(model.sinkformer_report)
    to_transformer(other)
    assert distance(run(other, True), run(model, True)) > 1e-4
    assert type(model.layers[0].self_attn).__name__ == "SinkhornMultiheadAttention"


def test_torch_save_keeps_the_conversion(tmp_path):
    model = to_sinkformer(encoder(), 5)
    torch.save(model, tmp_path / "model.pt")
    agree(run(torch.load(tmp_path / "model.pt", weights_only=False), True), run(model, True), atol=0.0)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    plain = encoder()
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    agree(run(to_sinkformer(plain, 5), True), run(model, True), atol=0.0)


def test_one_query_warns_once():
    module = to_sinkformer(nn.MultiheadAttention(8, 2, batch_first=True), 3)
    query, key = torch.randn(2, 1, 8), torch.randn(2, 5, 8)
    with pytest.warns(UserWarning, match=r"single query.*mean pooling.*`select`"):
        module(query, key, key)
    module(query, key, key)
    to_transformer(module)(query, key, key)


class AttentionPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)


def test_known_pooling_stays_softmax():
    model = nn.ModuleDict({"body": nn.MultiheadAttention(8, 2), "head": AttentionPool()})
    report = to_sinkformer(model).sinkformer_report
    assert list(report.converted) == ["body"]
    assert "mean pooling" in report.kept["head.attention"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: to_sinkformer(m, 2.5), ValueError, r"to_sinkformer: n_iters must be a whole number ≥ 1.*got 2\.5"),
        (lambda m: to_sinkformer(m, tau=1.5), ValueError, r"to_sinkformer: tau must lie in \[0, 1\].*got 1\.5"),
        (lambda m: to_sinkformer(m, tau="half"), TypeError, r"""number from 0.*"learned"; got 'half'"""),
        (lambda m: to_sinkformer(m, tau=torch.ones(2)), TypeError, r"got a tensor.*gives each head a parameter"),
        (lambda m: to_sinkformer(m, select=3), TypeError, r"select must be a pattern.*got int"),
        (lambda m: to_sinkformer(m, adapter="mine"), ValueError, r"must be None or one of 'sinkformers', .*'mine'"),
        (lambda m: to_sinkformer(m, select="layer.*"), ValueError, r"select matches none.*'layers.0.self_attn'"),
        (lambda _m: to_sinkformer(nn.Linear(2, 2)), ValueError, r"this Linear has no.*No attention was found at all"),
        (lambda m: set_n_iters(m, 3), ValueError, r"set_n_iters: nothing in this TransformerEncoder is converted"),
        (lambda m: set_tau(m, 2), ValueError, r"set_tau: tau must lie in"),
        (lambda m: set_tau(to_sinkformer(m), 0.5, select="x"), ValueError, r"select='x' matches none of the converted"),
        (
            lambda m: watch_attention(m).__enter__(),
            ValueError,
            r"watch_attention: nothing in this.*to_sinkformer first",
        ),
    ],
)
def test_refusals(call, error, message):
    model = encoder()
    with pytest.raises(error, match=f"(?s){message}"):
        call(model)
