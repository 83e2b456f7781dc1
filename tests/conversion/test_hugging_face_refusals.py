"""Modules of Hugging Face models that stay SoftMax, models that are refused, and what the report and errors state."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers as hf

import sinkformers.hf  # noqa: F401  attn_implementation="sinkhorn"
from sinkformers import set_n_iters, to_sinkformer, watch_attention
from sinkformers.distributed import SequenceGroup, context
from tests.conversion.hugging_face_models import (
    IMAGE,
    SEQ2SEQ,
    TEXT,
    WINDOWS,
    build,
    inputs,
)
from tests.conversion.test_one_way_encoders import sharpen


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
        (lambda: hf.IBertModel(hf.IBertConfig(**TEXT)), r"IBertSelfAttention.*1 more.*attention registry.*sdpa"),
        (
            lambda: hf.NystromformerModel(hf.NystromformerConfig(**TEXT)),
            r"NystromformerSelfAttention.*and 1 more.*another SoftMax",
        ),
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
    `to_sinkformer` converts such a model.
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
    report = to_sinkformer(model).sinkformer_report
    assert {entry.adapter for entry in report.converted.values()} == {"softmax"}
    plain.set_attn_implementation("sinkhorn")  # for an existing model, transformers refuses, and logs that
    assert plain.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
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


@pytest.mark.parametrize("causal", [None, "streaming"])
@pytest.mark.parametrize("name", ["Splinter", "LayoutLM"])
def test_encoders_that_do_not_say_that_they_are_not_causal_are_bidirectional(name, causal):
    torch.manual_seed(0)
    options = {"question_token_id": 5} if name == "Splinter" else {}
    model = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**TEXT, **options)).double().eval()
    sharpen(model)
    ids = torch.tensor([[4, 9, 14, 19, 24, 29], [40, 3, 38, 8, 36, 11]])
    valid = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    given = ({}, {"attention_mask": valid})
    with torch.no_grad():
        before = [model(ids, **each).last_hidden_state[valid > 0] for each in given]
        to_sinkformer(model, 1, causal=causal)
        assert {entry.causal for entry in model.sinkformer_report.converted.values()} == {None}
        after = [model(ids, **each).last_hidden_state[valid > 0] for each in given]
        # transformers' eager attention, Splinter's only one, computes SoftMax in float32
        assert_close(after, before, atol=1e-10 if name == "LayoutLM" else 1e-5, rtol=0)
    layer = model.encoder.layer[0].attention.self
    if name == "LayoutLM":  # its layers are always given a mask; without one transformers would make them causal
        with pytest.raises(NotImplementedError, match=r"without a mask and has no attribute is_causal.*eager"):
            layer(torch.zeros(1, 3, layer.all_head_size, dtype=torch.float64))
    alone = getattr(hf, f"{name}Model")(model.config).encoder
    with pytest.raises(ValueError, match="has no attribute is_causal, and the model that builds its masks is not"):
        to_sinkformer(alone, causal=causal)


def test_attention_that_stays_softmax_by_name_is_refused_on_parts_of_sequences(monkeypatch):
    """It would attend to the tokens of this rank alone."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 50}
    model = hf.AutoModel.from_config(hf.BartConfig(**sizes, **heads), attn_implementation="sinkhorn").eval()
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "encoder_hidden_states": torch.randn(1, 4, 16)}
    assert model.decoder(**given).last_hidden_state.isfinite().all()
    monkeypatch.setattr(context, "_active", [SequenceGroup(None, "gather")])  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError, match="BartAttention cannot run inside sequence_parallel: it stays"):
        model.decoder(**given)
