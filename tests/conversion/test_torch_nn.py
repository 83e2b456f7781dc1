"""Converted torch.nn models: the original at one iteration, doubly stochastic at many, no fused SoftMax kernels."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import oracle
from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention

EXACT = 1e-12  # float64, a few thousand roundings on values of order 1
BALANCED = 2**-10  # column error after 21 iterations, if each of the 10 column steps halves it at least


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, dtype=torch.float64, **options)


def encoder(**options):
    model = nn.TransformerEncoder(encoder_layer(), 2, **options)
    for parameter in model.parameters():  # torch gives all layers the same weights, and biases of zero
        nn.init.normal_(parameter, std=0.25)
    return model


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
VALID = torch.arange(7) < torch.tensor([[7], [5], [3]])


def run(model, padded, grad=True):
    """Return the outputs at valid tokens, and the gradients of all parameters."""
    torch.manual_seed(1)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    valid = VALID if padded else torch.ones_like(VALID)
    with torch.set_grad_enabled(grad):
        out = model(x, src_key_padding_mask=~VALID if padded else None)[valid]
    if not grad:
        return out, []
    return out, list(torch.autograd.grad(out.square().sum(), list(model.parameters())))


def agree(a, b, atol=EXACT):
    assert_close(a[0], b[0], atol=atol, rtol=0)
    for x, y in zip(a[1], b[1], strict=True):
        assert_close(x, y, atol=10 * atol * max(1.0, y.abs().max().item()), rtol=0)


def distance(a, b):
    return (a[0] - b[0]).abs().max().item()


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
    with pytest.raises(NotImplementedError, match="is_causal=True works with n_iters=1"):
        model(torch.randn(3, 7, 8, dtype=torch.float64), mask=mask)


@pytest.mark.parametrize(
    ("select", "picked"),
    [
        ("layers.1.*", ["layers.1.self_attn"]),
        (lambda name, _module: name.startswith("layers.0"), ["layers.0.self_attn"]),
        (lambda _name, module: isinstance(module, nn.MultiheadAttention), ["layers.0.self_attn", "layers.1.self_attn"]),
    ],
)
def test_select_picks(select, picked):
    model = to_sinkformer(encoder(), select=select)
    assert list(model.sinkformer_report.converted) == picked
    assert set(model.sinkformer_report.kept.values()) <= {"not selected"}
    converted = [name for name, module in model.named_modules() if hasattr(module, "sinkhorn")]
    assert converted == picked


def test_a_second_call_adds_and_changes():
    model = to_sinkformer(encoder(), 3, select="layers.0.*")
    to_sinkformer(model, 5, tau=0.5, select="layers.1.*")
    found = {
        name: (module.sinkhorn.n_iters, module.sinkhorn.tau)
        for name, module in model.named_modules()
        if name[-4:] == "attn"
    }
    assert found == {"layers.0.self_attn": (3, 1.0), "layers.1.self_attn": (5, 0.5)}
    assert [entry.kind for entry in model.sinkformer_report.entries] == ["MultiheadAttention"] * 2
    to_transformer(to_sinkformer(model, 7))
    assert type(model.layers[1].self_attn) is nn.MultiheadAttention


def test_settings_change_for_selected_modules():
    model = to_sinkformer(encoder(), 3)
    set_n_iters(model, 7, select="*.1.*")
    set_tau(model, 0.25, select=lambda name, _module: "0" in name)
    assert (model.layers[0].self_attn.sinkhorn.n_iters, model.layers[0].self_attn.sinkhorn.tau) == (3, 0.25)
    assert (model.layers[1].self_attn.sinkhorn.n_iters, model.layers[1].self_attn.sinkhorn.tau) == (7, 1.0)


@pytest.mark.parametrize("padded", [True, False])
def test_tau_zero_is_softmax_and_one_is_sinkhorn(padded):
    model = encoder()
    softmax = run(model, padded)
    to_sinkformer(model, n_iters=5)
    sinkhorn = run(model, padded)
    set_tau(model, 0.0)
    agree(run(model, padded), softmax)
    set_tau(model, 1e-9)
    agree(run(model, padded), softmax, atol=1e-7)  # continuous there
    set_tau(model, 1.0)
    agree(run(model, padded), sinkhorn, atol=0.0)


def test_learned_tau_is_one_parameter_and_has_its_gradient():
    model = encoder()
    names = [name for name, _ in model.named_parameters()]
    to_sinkformer(model, tau="learned")
    added = {name: p for name, p in model.named_parameters() if name not in names}
    assert list(added) == ["layers.0.self_attn.sinkhorn_tau", "layers.1.self_attn.sinkhorn_tau"]
    assert model.sinkformer_report.parameters == list(added)
    assert all(p.shape == (2,) and p.dtype == torch.float64 for p in added.values())
    set_tau(model, 0.3)
    learned = run(model, True)
    with torch.no_grad():
        added["layers.1.self_attn.sinkhorn_tau"] += torch.tensor([0.2, -0.1])
    fixed = copy.deepcopy(model)
    step, loss = 1e-4, []
    logit = fixed.layers[1].self_attn.sinkhorn_tau
    gradient = dict(zip([n for n, _ in model.named_parameters()], run(model, True)[1], strict=True))
    for sign in (1, -1):
        with torch.no_grad():
            logit[1] += sign * step
        loss.append(run(fixed, True)[0].square().sum().item())
        with torch.no_grad():
            logit[1] -= sign * step
    slope = (loss[0] - loss[1]) / (2 * step)
    assert gradient["layers.1.self_attn.sinkhorn_tau"][1].item() == pytest.approx(
        slope, rel=1e-6, abs=1e-8
    )  # loss·eps/step
    to_sinkformer(model, tau=0.3)
    assert [name for name, _ in model.named_parameters()] == names
    assert_close(run(model, True)[0], learned[0], atol=EXACT, rtol=0)


def test_setting_a_learned_tau_moves_its_logits_and_keeps_the_parameter():
    model = to_sinkformer(encoder(), tau="learned")
    parameter = model.layers[0].self_attn.sinkhorn_tau
    set_tau(model, 0.1)
    assert model.layers[0].self_attn.sinkhorn_tau is parameter
    assert_close(parameter.sigmoid(), torch.full((2,), 0.1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"learned, so it must lie strictly between 0 and 1; got 1\.0\."):
        set_tau(model, 1.0)
    set_tau(to_sinkformer(model, tau=1.0), "learned")
    assert model.sinkformer_report.parameters == [f"layers.{i}.self_attn.sinkhorn_tau" for i in (0, 1)]


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


@pytest.mark.parametrize("padded", [True, False])
def test_watched_column_sums_are_one(padded):
    model = to_sinkformer(encoder(), n_iters=21)
    plain = run(model, padded)
    with watch_attention(model) as watch:
        watched = run(model, padded)
    agree(watched, plain, atol=0.0)
    assert list(watch) == ["layers.0.self_attn", "layers.1.self_attn"]
    valid = VALID if padded else torch.ones_like(VALID)
    for layer in watch.values():
        (seen,) = layer.calls
        assert seen.rows.equal(valid[:, None].expand(3, 2, 7))
        assert seen.columns.equal(seen.rows)
        assert_close(seen.column_sums, seen.columns.double(), atol=BALANCED, rtol=0)
        assert seen.row_error.max() < EXACT
        deviation = (seen.column_sums - 1).abs().masked_fill(~seen.columns, 0).amax(-1)
        assert_close(seen.column_error, deviation, atol=EXACT, rtol=0)
        assert (seen.row_entropy[seen.rows] > 0).all()
        assert (seen.row_entropy <= seen.columns.sum(-1, keepdim=True).double().log() + EXACT).all()
    run(model, padded)
    assert all(len(layer.calls) == 1 for layer in watch.values())
    assert re.search(r"^layers\.1\.self_attn +1 ", str(watch), re.MULTILINE)  # its largest column sum


def test_uniform_attention_has_the_entropy_of_the_valid_tokens():
    module = to_sinkformer(nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64), 3)
    nn.init.zeros_(module.in_proj_weight)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    with watch_attention(module) as watch:
        module(x, x, x, key_padding_mask=~VALID, need_weights=False)
    (seen,) = watch[""].calls
    expected = torch.where(VALID, VALID.sum(-1, keepdim=True).double().log(), 0.0)
    assert_close(seen.row_entropy, expected[:, None].expand(3, 2, 7), atol=EXACT, rtol=0)


def test_softmax_is_watched_at_one_iteration():
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    weights = module(x, x, x, average_attn_weights=False)[1]
    with watch_attention(to_sinkformer(module, 1)) as watch:
        module(x, x, x)
    assert_close(watch[""].calls[0].column_sums, weights.sum(-2), atol=EXACT, rtol=0)
    assert_close(watch[""].calls[0].row_entropy, -(weights * weights.log()).sum(-1), atol=EXACT, rtol=0)


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
