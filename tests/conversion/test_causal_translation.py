"""Encoder–decoders of Hugging Face whose three attentions are converted, and encoders that process a stream."""

import copy

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers as hf

from sinkformers import set_n_iters, to_sinkformer, to_transformer, watch_attention
from tests.conversion.decoder_models import GPT
from tests.conversion.hugging_face_models import VALID, build, inputs
from tests.conversion.test_causal_generation import EXACT, SINGLE, WAYS
from tests.conversion.test_one_way_encoders import STREAMS, sharpen, stream

NAMES = ("bart", "marian", "t5", "whisper")
SOUND = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32, "decoder_start_token_id": 1}
HALF = {"vocab_size": 53, "d_model": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HALF |= {f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in (("layers", 1), ("attention_heads", 3))}
HALF |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def translator(name):
    if name != "whisper":
        return build(name).eval()
    torch.manual_seed(0)
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**HALF, **SOUND))
    sharpen(model)
    return model.double().eval()


def source(name):
    if name == "whisper":
        return {
            "input_features": torch.randn(3, 8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        }
    return {key: value for key, value in inputs(name).items() if key != "decoder_input_ids"}


TARGET = inputs("bart")["decoder_input_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_all_three_attentions_convert_and_one_iteration_is_the_original(name):
    model = translator(name)
    given = {**source(name), "decoder_input_ids": TARGET}
    before = model(**given).logits
    kept = dict(to_sinkformer(copy.deepcopy(model)).sinkformer_report.kept)
    assert all('causal="streaming"' in reason for reason in kept.values())
    to_sinkformer(model, 1, causal="streaming")
    found = model.sinkformer_report.converted
    assert not model.sinkformer_report.kept
    assert {each: entry.causal for each, entry in found.items()} == {
        each: "streaming" if each in kept else None for each in found
    }
    assert_close(model(**given).logits, before, atol=EXACT, rtol=0)
    set_n_iters(model, 3)
    assert model.config.sinkhorn == {"n_iters": 3, "tau": 1.0, "causal": "streaming"}
    assert not torch.allclose(model(**given).logits, before, atol=1e-4)
    assert to_transformer(model)(**given).logits.equal(before)


@pytest.mark.parametrize("name", NAMES)
def test_no_output_depends_on_a_later_target_nor_on_padding_of_the_source(name):
    model = to_sinkformer(translator(name), 3, causal="streaming")
    x = model.get_decoder().get_input_embeddings()(TARGET).detach().requires_grad_()
    out = model(**source(name), decoder_inputs_embeds=x, use_cache=False).logits
    for i in (0, 2, 3):
        (found,) = torch.autograd.grad(out[:, i].square().sum(), x, retain_graph=True)
        assert found[:, i + 1 :].count_nonzero() == 0
        assert found[:, i].abs().max() > 1e-9
    if name == "whisper":
        return
    given = source(name)
    alone = {key: value[1:2, : VALID[1].sum()] for key, value in given.items()}
    found = model(**alone, decoder_input_ids=TARGET[1:2]).logits
    assert_close(model(**given, decoder_input_ids=TARGET).logits[1:2], found, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_generation_with_a_cache_equals_generation_without(name, way):
    model = to_sinkformer(translator(name), 3, causal="streaming")
    found = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "use_cache": use_cache, **WAYS[way]}
        out = model.generate(**source(name), **options, return_dict_in_generate=True, output_logits=True)
        found.append((out.sequences, torch.stack(out.logits)))
    assert found[0][0].equal(found[1][0])
    assert_close(found[0][1], found[1][1], atol=SINGLE, rtol=0)


def test_stale_sums_of_cross_attention_are_refused():
    model = to_sinkformer(translator("bart"), 3, causal="streaming", select="*.encoder_attn")
    assert len(model.sinkformer_report.converted) == model.config.decoder_layers
    given = source("bart")
    with torch.no_grad():
        first = model(**given, decoder_input_ids=TARGET[:, :3])
        model(**given, decoder_input_ids=TARGET[:, 3:4], past_key_values=copy.deepcopy(first.past_key_values))
        first.past_key_values.self_attention_cache.crop(-1)
        with pytest.raises(ValueError, match="holds 2 tokens before this call, and the column sums of 3"):
            model(**given, decoder_input_ids=TARGET[:, 2:3], past_key_values=first.past_key_values)
        module, x = model.model.decoder.layers[0].encoder_attn, torch.zeros(1, 1, 24, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match=r"BartAttention is the cross-attention.*given a DynamicCache"):
            module(x, key_value_states=x, past_key_values=hf.DynamicCache())


@pytest.mark.parametrize("name", STREAMS)
def test_streaming_encoders_convert_frame_by_frame(name):
    model, sound, options, before = stream(name)
    to_sinkformer(model, 3, causal="streaming")
    assert {entry.causal for entry in model.sinkformer_report.converted.values()} == {"streaming"}
    assert model.config.sinkhorn == {"n_iters": 3, "tau": 1.0, "causal": "streaming"}
    sound.requires_grad_()
    frames = model(sound, **options).last_hidden_state
    assert not torch.allclose(frames, before, atol=1e-4)
    plain = copy.deepcopy(to_transformer(copy.deepcopy(model)))(sound, **options).last_hidden_state
    assert plain.equal(before)
    for i in (0, 7, 12):
        (found,) = torch.autograd.grad(frames[:, i].square().sum(), sound, retain_graph=True)
        (seen,) = torch.autograd.grad(plain[:, i].square().sum(), sound, retain_graph=True)
        last = seen[0].reshape(sound.shape[1], -1).abs().amax(-1).nonzero().max()  # what SoftMax sees, and no more
        assert last < sound.shape[1] - 1
        assert found[0, last + 1 :].count_nonzero() == 0
    set_n_iters(model, 1)
    assert_close(model(sound, **options).last_hidden_state, before, atol=EXACT, rtol=0)
    with watch_attention(model) as watch:
        model(sound, **options)
    assert "column error" in repr(watch)


def captioner():
    """Return a model of images whose decoder is GPT-2, with cross-attention of the class of its self-attention."""
    torch.manual_seed(0)
    vision = hf.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=32, image_size=16, patch_size=8
    )
    text = hf.GPT2Config(**GPT, add_cross_attention=True, is_decoder=True)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    model = hf.VisionEncoderDecoderModel(config).double().eval()
    sharpen(model)
    return model


def test_cross_attention_without_a_name_of_its_own_is_causal():
    model, crosses = captioner(), {f"decoder.transformer.h.{i}.crossattention" for i in range(2)}
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[4, 9, 14, 19, 24, 29], [40, 3, 38, 8, 36, 11]])
    later = torch.cat([ids[:, :4], ids[:, 4:] + 1], 1)

    def change(model):
        first, second = (model(pixel_values=pixels, decoder_input_ids=each).logits for each in (ids, later))
        assert not torch.allclose(first[:, 4:], second[:, 4:], atol=1e-2)
        return (first - second)[:, :4].abs().max()

    with torch.no_grad():
        before = model(pixel_values=pixels, decoder_input_ids=ids).logits
        plain = to_sinkformer(copy.deepcopy(model))
        assert crosses <= dict(plain.sinkformer_report.kept).keys()
        assert change(plain) == 0
        to_sinkformer(model, 1, causal="streaming", select="decoder.*")
        assert_close(model(pixel_values=pixels, decoder_input_ids=ids).logits, before, atol=EXACT, rtol=0)
        set_n_iters(model, 3)
        assert change(model) < EXACT
    given = {"pixel_values": pixels, "decoder_start_token_id": 1, "max_new_tokens": 6, "do_sample": False}
    given |= {"pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    found, expected = (model.generate(**given, use_cache=use_cache) for use_cache in (True, False))
    assert found.sequences.equal(expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=SINGLE, rtol=0)
