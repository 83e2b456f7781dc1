"""Converted Hugging Face models: the original at one iteration, doubly stochastic at many, padding without effect."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers as hf

import oracle
import sinkformers.hf  # noqa: F401  attn_implementation="sinkhorn"
from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from sinkformers.conversion import hugging_face_registry
from tests.conversion.hugging_face_models import (
    BUILDERS,
    IMAGE,
    SEQ2SEQ,
    TEXT,
    TEXTS,
    TRANSLATORS,
    VALID,
    WINDOWS,
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


@pytest.mark.filterwarnings("ignore:sinkformers.*clip_text_model:UserWarning")
@pytest.mark.parametrize("name", BUILDERS)
def test_saved_settings_are_loaded(name, tmp_path):
    model = to_sinkformer(build(name), 5, tau=0.75).eval()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    assert_close(output(name, loaded), output(name, model), atol=EXACT, rtol=0)
    set_n_iters(loaded, 7)
    set_n_iters(model, 7)
    assert_close(output(name, loaded), output(name, model), atol=EXACT, rtol=0)
    softmax = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    for other in (model, loaded):
        assert_close(output(name, to_transformer(other)), output(name, softmax), atol=EXACT, rtol=0)


def test_a_model_loaded_by_name_can_be_restored_too():
    model, plain = build("t5", "sinkhorn").eval(), build("t5").eval()
    assert (output("t5", model) - output("t5", plain)).abs().max() > 1e-3
    assert_close(output("t5", to_transformer(model)), output("t5", plain), atol=EXACT, rtol=0)
    assert not hasattr(model.config, "sinkhorn")


def test_causal_masks_are_written_out():
    mask = hf.AttentionMaskInterface()["sinkhorn"](batch_size=2, q_length=5, kv_length=5)
    assert mask.equal(torch.ones(2, 1, 5, 5, dtype=torch.bool).tril())


def test_settings_come_from_the_configuration():
    config = hf.BertConfig(**TEXT, sinkhorn={"n_iters": 5, "tau": 0.5})
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config, attn_implementation="sinkhorn").double().eval()
    torch.manual_seed(0)
    other = hf.AutoModel.from_config(hf.BertConfig(**TEXT)).double().eval()
    assert_close(output("bert", model), output("bert", to_sinkformer(other, 5, tau=0.5)), atol=EXACT, rtol=0)
    assert other.config.sinkhorn == config.sinkhorn


def test_parts_of_a_model_write_their_configuration_too():
    encoder = to_sinkformer(build("bert").encoder, 5, tau=0.5)
    assert encoder.config.sinkhorn == {"n_iters": 5, "tau": 0.5}
    to_transformer(encoder)
    assert not hasattr(encoder.config, "sinkhorn")


def test_the_configuration_follows_the_settings():
    model = to_sinkformer(hf.BertModel(hf.BertConfig(**TEXT)), 3)
    set_n_iters(model, 7)
    assert model.config.sinkhorn == {"n_iters": 7, "tau": 1.0}
    set_tau(model, 0.5)
    assert model.config.sinkhorn == {"n_iters": 7, "tau": 0.5}
    first = next(iter(model.sinkformer_report.converted))
    set_n_iters(model, 5, select=first)
    assert {name: settings["n_iters"] for name, settings in model.config.sinkhorn["modules"].items()} == {
        name: 5 if name == first else 7 for name in model.sinkformer_report.converted
    }


def test_partly_converted_models_list_their_modules_in_the_configuration(tmp_path):
    model = to_sinkformer(build("bert"), 5, select="*layer.1.*").eval()
    name = "encoder.layer.1.attention.self"
    assert model.config.sinkhorn == {"modules": {name: {"n_iters": 5, "tau": 1.0}}}
    assert model.sinkformer_report.kept == {"encoder.layer.0.attention.self": "not selected"}
    with watch_attention(model) as watch:
        expected = output("bert", model)
    assert list(watch) == [name]
    model.save_pretrained(tmp_path)
    loaded = hf.BertModel.from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"(?s)has settings for single modules.*to_sinkformer\(model, \*\*settings"):
        output("bert", loaded)
    loaded = hf.BertModel.from_pretrained(tmp_path, dtype=torch.float64)
    for module, settings in loaded.config.sinkhorn["modules"].items():
        to_sinkformer(loaded, **settings, select=module)
    assert_close(output("bert", loaded), expected, atol=EXACT, rtol=0)


def test_learned_tau_is_saved_and_loaded_as_a_parameter(tmp_path):
    model = to_sinkformer(build("bert"), tau="learned").eval()
    set_tau(model, 0.2)
    model.save_pretrained(tmp_path)
    loaded = hf.BertModel.from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"needs parameters.*load its state_dict"):
        output("bert", loaded)
    fresh = to_sinkformer(hf.BertModel(hf.BertConfig.from_pretrained(tmp_path)).double(), tau="learned").eval()
    fresh.load_state_dict(model.state_dict())
    assert_close(output("bert", fresh), output("bert", model), atol=EXACT, rtol=0)


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


def test_the_report_of_a_model_with_a_causal_half():
    report = to_sinkformer(build("clip")).sinkformer_report
    assert [name for name in report.converted if not name.startswith("vision_model")] == []
    assert all("causal" in reason for name, reason in report.kept.items() if name.startswith("text_model"))
    assert len(report.kept) == 2


def test_decoders_are_reported():
    report = to_sinkformer(build("t5")).sinkformer_report
    assert len(report.kept) == 4
    assert "causal" in report.kept["decoder.block.0.layer.0.SelfAttention"]
    assert "cross-attention" in report.kept["decoder.block.1.layer.1.EncDecAttention"]


def test_sliding_windows_stay_softmax_and_are_reported():
    sizes = {**TEXT, "num_hidden_layers": 3, "cls_token_id": 1, "sep_token_id": 2}
    config = hf.ModernBertConfig(**sizes, global_attn_every_n_layers=2)
    model = to_sinkformer(hf.ModernBertModel(config))
    assert list(model.sinkformer_report.converted) == ["layers.0.attn", "layers.2.attn"]
    assert "sliding_window" in model.sinkformer_report.kept["layers.1.attn"]
    model.eval()(input_ids=inputs("bert")["input_ids"])
    named = hf.ModernBertModel._from_config(config, attn_implementation="sinkhorn").eval()
    with pytest.raises(NotImplementedError, match=r"ModernBertAttention asks for sliding_window.*says so"):
        named(input_ids=inputs("bert")["input_ids"])


def test_pooling_heads_stay_softmax():
    report = to_sinkformer(hf.SiglipVisionModel(hf.SiglipVisionConfig(**IMAGE))).sinkformer_report
    assert len(report.converted) == 2
    assert "mean pooling" in report.kept["head.attention"]


GPT = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 53, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hf.GPT2Model(hf.GPT2Config(**GPT)), r"GPT2Model has no bidirectional.*h\.0\.attn.*1 more: causal"),
        (lambda: hf.LlamaModel(hf.LlamaConfig(**TEXT)), r"LlamaModel has no bidirectional.*self_attn.*1 more: causal"),
        (lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)), r"MPNetSelfAttention.*1 more.*attention registry.*sdpa"),
        (lambda: hf.Swinv2Model(hf.Swinv2Config(**WINDOWS)), r"Swinv2SelfAttention.*and 3 more.*attention registry"),
    ],
)
def test_what_cannot_be_converted_is_refused(model, message):
    model = model()
    types = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        to_sinkformer(model)
    assert [type(module) for module in model.modules()] == types


def test_a_decoder_loaded_by_name_is_refused():
    model = hf.GPT2Model._from_config(hf.GPT2Config(**GPT), attn_implementation="sinkhorn")
    with pytest.raises(ValueError, match=r'"sinkhorn" was asked of a gpt2 model.*no bidirectional self-attention'):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_a_causal_tower_loaded_by_name_is_warned_of_once():
    model = hf.CLIPTextModel._from_config(hf.CLIPTextConfig(**TEXT), attn_implementation="sinkhorn").eval()
    ids = inputs("bert")["input_ids"]
    with pytest.warns(UserWarning, match=r"clip_text_model, whose CLIPAttention is causal and stays SoftMax"):
        named = model(input_ids=ids).last_hidden_state
    model(input_ids=ids)  # here, warnings are errors
    with pytest.raises(ValueError, match=r"asked of this CLIPTextModel, but nothing in it attends by Sinkhorn"):
        set_n_iters(model, 5)
    model.set_attn_implementation("sdpa")
    assert named.equal(model(input_ids=ids).last_hidden_state)


OUTSIDE = {
    "deberta": lambda: hf.DebertaV2Config(**TEXT),
    "mpnet": lambda: hf.MPNetConfig(**TEXT),
    "xlnet": lambda: hf.XLNetConfig(vocab_size=53, d_model=24, n_layer=2, n_head=3, d_inner=32),
    "fsmt": lambda: hf.FSMTConfig(langs=["en", "de"], src_vocab_size=53, tgt_vocab_size=53, **SEQ2SEQ),
    "swinv2": lambda: hf.Swinv2Config(**WINDOWS),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # by DeBERTa, as it is imported
@pytest.mark.parametrize("name", OUTSIDE)
def test_attention_outside_the_registry_loaded_by_name_is_softmax_and_our_functions_raise(name, tmp_path):
    """transformers accepts the name without calling our function, so only our other functions can detect it.

    If this fails because loading raises, or because the model has become a Sinkformer, update docs/convert.md.
    """
    plain = hf.AutoModel.from_config(OUTSIDE[name]()).eval()
    plain.save_pretrained(tmp_path)
    model = hf.AutoModel.from_pretrained(tmp_path, attn_implementation="sinkhorn").eval()
    assert model.config._attn_implementation == "sinkhorn"
    ids = inputs("bert")["input_ids"]
    given = {"pixel_values": torch.randn(1, 3, 16, 16)} if name == "swinv2" else {"input_ids": ids}
    if name == "fsmt":
        given["decoder_input_ids"] = ids
    assert model(**given)[0].equal(plain(**given)[0])
    message = (
        rf'"sinkhorn" was asked of this {type(model).__name__}, but nothing in it attends by Sinkhorn: it runs SoftMax'
    )
    with pytest.raises(ValueError, match=message), watch_attention(model):
        pass
    with pytest.raises(ValueError, match=r"(?s)no bidirectional self-attention.*attention registry"):
        to_sinkformer(model)
    plain.set_attn_implementation("sinkhorn")  # for an existing model, transformers refuses, and logs that
    assert plain.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"softcap": 30.0}, NotImplementedError, "asks for softcap"),
        ({"s_aux": torch.ones(3)}, NotImplementedError, "asks for s_aux"),
        ({"is_causal": True}, NotImplementedError, "is_causal=True.*later tokens"),
    ],
)
def test_unsupported_arguments_raise(arguments, error, message):
    attention = to_sinkformer(build("bert")).encoder.layer[0].attention.self
    tokens = torch.randn(2, 3, 5, 8)
    with pytest.raises(error, match=message):
        hf.AttentionInterface()["sinkhorn"](attention, tokens, tokens, tokens, None, **arguments)
    with pytest.raises(TypeError, match="mask must be a tensor; got dict"):
        hf.AttentionInterface()["sinkhorn"](attention, tokens, tokens, tokens, {})


@pytest.mark.parametrize("stored", [5, {"iterations": 3}])
def test_a_wrong_configuration_is_refused(stored):
    model = build("bert", "sinkhorn")
    model.config.sinkhorn = stored
    with pytest.raises(ValueError, match=r"config\.sinkhorn must be a dictionary.*got"):
        output("bert", model)


def test_copies_pickles_and_other_processes(tmp_path):
    model = to_sinkformer(build("bert"), 5, tau=0.5).eval()
    expected = output("bert", model)
    assert output("bert", copy.deepcopy(model)).equal(expected)
    assert output("bert", pickle.loads(pickle.dumps(model))).equal(expected)
    other = to_transformer(copy.deepcopy(model))
    assert (output("bert", other) - expected).abs().max() > 1e-3
    torch.save({"model": model, "expected": expected, "inputs": inputs("bert"), "valid": VALID}, tmp_path / "saved.pt")
    code = (
        "import sys, torch; saved = torch.load(sys.argv[1], weights_only=False)\n"
        "out = saved['model'](**saved['inputs']).last_hidden_state[saved['valid']]\n"
        "assert torch.allclose(out, saved['expected'], rtol=0, atol=1e-10)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "saved.pt"], check=True)


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
