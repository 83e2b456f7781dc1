"""Converted Hugging Face models: the original at one iteration, doubly stochastic at many, padding without effect."""

import copy

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers as hf

import sinkformers.hf  # noqa: F401  attn_implementation="sinkhorn"
from sinkformers import to_sinkformer, to_transformer, watch_attention
from sinkformers.conversion import hugging_face_registry
from tests import oracle
from tests.conversion.hugging_face_models import (
    BUILDERS,
    TEXTS,
    TRANSLATORS,
    VALID,
    build,
    inputs,
    output,
)

EXACT = 1e-10  # float64; some 10⁴ roundings on values up to 10²
BALANCED = 2**-10  # column error after 21 iterations, if each of the 10 column steps halves it at least


def gradients(model, out):
    """Return the gradients of all parameters along a fixed direction."""
    torch.manual_seed(7)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad((out * torch.randn_like(out)).sum(), learned, materialize_grads=True)


def encoder_states(name, model, padded=True):
    if name not in TRANSLATORS:
        return output(name, model, padded)
    given = inputs(name, padded)
    given.pop("decoder_input_ids")
    return model.get_encoder()(**given).last_hidden_state[VALID if padded else ...]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("implementation", "training"), [("sdpa", True), ("sdpa", False), ("eager", False)])
def test_one_iteration_is_the_original(name, implementation, training):
    model = build(name, implementation).train(training)
    torch.manual_seed(5)  # in training, the dropout of weights must draw the same numbers too
    before = output(name, model)
    expected = gradients(model, before)
    to_sinkformer(model, n_iters=1)
    torch.manual_seed(5)
    after = output(name, model)
    tolerance = EXACT if implementation == "sdpa" else 1e-5  # the eager functions of transformers compute in float32
    assert_close(after, before, atol=tolerance, rtol=0)
    for got, grad in zip(gradients(model, after), expected, strict=True):
        assert_close(got, grad, atol=tolerance * max(1.0, grad.abs().max().item()), rtol=0)


@pytest.mark.parametrize("name", BUILDERS)
def test_many_iterations_balance_the_columns_of_every_converted_layer(name):
    model = to_sinkformer(build(name), n_iters=21).eval()
    with watch_attention(model) as watch:
        output(name, model)
    assert len(watch) == len(model.sinkformer_report.converted) == (4 if name == "swin" else 2)
    for layer in watch.values():
        (seen,) = layer.calls
        if name in TEXTS + TRANSLATORS:
            assert seen.columns.equal(VALID[:, None].expand(3, 3, 11))
            assert seen.rows.equal(seen.columns)
        assert_close(seen.column_sums, seen.columns.double(), atol=BALANCED, rtol=0)
        assert seen.row_error.max() < EXACT
    softmax = to_transformer(copy.deepcopy(model))
    assert (output(name, model) - output(name, softmax)).abs().max() > 1e-3


@pytest.mark.parametrize("name", TEXTS + TRANSLATORS)
@pytest.mark.parametrize("n_iters", [3, 21])
def test_padding_changes_no_output(name, n_iters):
    model = to_sinkformer(build(name), n_iters).eval()
    expected = output(name, model)
    other = torch.where(VALID, inputs(name)["input_ids"], 4)
    assert output(name, model, input_ids=other).equal(expected)
    states = encoder_states(name, model).split(VALID.sum(-1).tolist())
    for each, length, ids in zip(states, VALID.sum(-1).tolist(), other, strict=True):
        alone = model.get_encoder() if name in TRANSLATORS else model
        assert_close(alone(input_ids=ids[None, :length]).last_hidden_state[0], each, atol=EXACT, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_texts_of_one_token_are_not_taken_for_a_causal_mask(implementation):
    """If every text has one token, only the first column of the mask is valid, as in the first row of a causal one."""
    model = to_sinkformer(build("bert", implementation), 5).eval()
    ids = inputs("bert")["input_ids"]
    alone = model(input_ids=ids[:, :1]).last_hidden_state[:, 0]
    padded = model(input_ids=ids, attention_mask=torch.eye(11)[:1].long().expand(3, 11)).last_hidden_state[:, 0]
    assert_close(padded, alone, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", TEXTS + TRANSLATORS)
def test_masks_of_transformers_are_passed_on_as_vectors(name, monkeypatch):
    """They come as matrices; given two vectors, the kernels skip the padding."""
    seen = []
    attend = hugging_face_registry.attend

    def spy(*args, **options):
        seen.append(options)
        return attend(*args, **options)

    monkeypatch.setattr(hugging_face_registry, "attend", spy)
    model = to_sinkformer(build(name), 5).eval()
    encoder_states(name, model)
    assert len(seen) == 2
    for options in seen:
        for side in ("query_mask", "key_mask"):
            assert options[side].expand(3, 1, 11).equal(VALID[:, None])
        mask = options.get("attn_mask")
        assert mask is None or mask.dtype != torch.bool  # T5's positions are a bias


@pytest.mark.parametrize("name", BUILDERS)
def test_back_to_softmax_exactly(name):
    model = build(name).eval()
    config, before = model.config.to_dict(), output(name, model)
    state = {key: id(parameter) for key, parameter in model.named_parameters()}
    to_sinkformer(model, 3, tau="learned")
    assert len(list(model.parameters())) == len(state) + len(model.sinkformer_report.converted)
    to_transformer(model)
    assert output(name, model).equal(before)
    assert {key: id(parameter) for key, parameter in model.named_parameters()} == state
    assert model.config.to_dict() == config
    assert all(getattr(module, "config", model.config)._attn_implementation == "sdpa" for module in model.modules())


def test_causal_masks_are_written_out():
    mask = hf.AttentionMaskInterface()["sinkhorn"](batch_size=2, q_length=5, kv_length=5)
    assert mask.equal(torch.ones(2, 1, 5, 5, dtype=torch.bool).tril())


@pytest.mark.parametrize("name", ["bert", "vit", "swin", "t5", "bart"])
def test_returned_attentions_are_doubly_stochastic(name):
    model = to_sinkformer(build(name), 21).eval()
    given = inputs(name)
    plain = output(name, model)
    out = model(**given, output_attentions=True)
    weights = out.encoder_attentions if name in TRANSLATORS else out.attentions
    with watch_attention(model) as watch:
        assert_close(output(name, model, output_attentions=True), plain, atol=EXACT, rtol=0)
    layers = list(watch.values())[1::2] if name == "swin" else watch.values()  # Swin returns one per stage
    for each, layer in zip(weights, layers, strict=True):
        (seen,) = layer.calls
        assert_close(each.sum(-2), seen.column_sums, atol=EXACT, rtol=0)
        assert_close(each.sum(-2), seen.columns.double(), atol=BALANCED, rtol=0)
        assert_close(each.sum(-1), seen.rows.double(), atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", TRANSLATORS)
@pytest.mark.parametrize("n_iters", [1, 5])
def test_generation_with_beams_uses_the_converted_encoder_once(name, n_iters):
    model = build(name).eval()
    given = {key: value for key, value in inputs(name).items() if key != "decoder_input_ids"}
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    softmax, before = model.generate(**given, **beams), encoder_states(name, model)
    plain = copy.deepcopy(model)
    to_sinkformer(model, n_iters)
    with watch_attention(model) as watch:
        out = model.generate(**given, **beams)
    assert [len(layer.calls) for layer in watch.values()] == [1, 1]
    if n_iters == 1:
        assert out.equal(softmax)
    else:
        assert (encoder_states(name, model) - before).abs().max() > 1e-3
    # The decoder is the original: from the same encoder outputs it generates the same.
    states = model.get_encoder()(**given)
    again = plain.generate(encoder_outputs=states, attention_mask=given["attention_mask"], **beams)
    assert out.equal(again)


def test_the_named_implementation_generates_the_same():
    model, named = build("bart").eval(), build("bart", "sinkhorn").eval()
    named.config.sinkhorn = named.config.sinkhorn if hasattr(named.config, "sinkhorn") else {"n_iters": 5}
    given = {key: value for key, value in inputs("bart").items() if key != "decoder_input_ids"}
    out = to_sinkformer(model, 5).generate(**given, num_beams=3, max_new_tokens=6, do_sample=False)
    assert named.generate(**given, num_beams=3, max_new_tokens=6, do_sample=False).equal(out)


def test_position_bias_and_scale_are_used():
    model = to_sinkformer(build("t5"), 5, tau=0.8).eval()
    attention = model.encoder.block[0].layer[0].SelfAttention
    x = torch.randn(3, 11, 24, dtype=torch.float64)
    query, key, value = (f(x).unflatten(-1, (3, 8)).transpose(1, 2) for f in (attention.q, attention.k, attention.v))
    bias = attention.compute_bias(11, 11)
    mask = (VALID[:, None, :] & VALID[:, :, None])[:, None]
    exact = oracle.attention(query, key, value, 5, tau=0.8, mask=mask, bias=bias.expand(3, 3, 11, 11), scale=1.0)
    keys = VALID[:, None, None]
    floats = torch.zeros(3, 1, 11, 11, dtype=torch.float64).masked_fill(~keys, torch.finfo(torch.float64).min)
    for given in (keys, keys.expand(3, 1, 11, 11), keys.expand(3, 1, 11, 11).contiguous(), mask, floats):
        out = attention(x, mask=given)[0]
        assert_close(out[VALID], attention.o(exact.transpose(1, 2).flatten(2))[VALID], atol=EXACT, rtol=0)


def test_grouped_heads_share_keys():
    module = to_sinkformer(build("bert"), 5).encoder.layer[0].attention.self
    query, key, value = torch.randn(2, 6, 7, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    forward = hf.AttentionInterface()["sinkhorn"]
    expected = oracle.attention(query, *(x.repeat_interleave(2, 1) for x in (key, value)), 5)
    for need_weights in (True, False):
        out, weights = forward(module, query, key, value, None, output_attentions=need_weights)
        assert_close(out.transpose(1, 2).double(), expected, atol=1e-5, rtol=0)  # float32, values of order 1
        assert (weights is not None) == need_weights


@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
def test_compiled_whole(name):
    model = to_sinkformer(build(name), 5, tau="learned").eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, got = output(name, model), output(name, compiled)
    assert_close(got, out, atol=EXACT, rtol=0)
    assert_close(gradients(model, got), gradients(model, out), atol=1e3 * EXACT, rtol=0)


def test_other_implementations_chosen_later_do_not_undo_the_conversion():
    model = to_sinkformer(build("bert"), 5).eval()
    expected = output("bert", model)
    model.set_attn_implementation("eager")
    assert_close(output("bert", model), expected, atol=EXACT, rtol=0)
