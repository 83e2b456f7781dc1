"""Streaming encoders: their masks order the frames, so converted modules must refuse them."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers as hf
from transformers.models.moonshine_streaming.modeling_moonshine_streaming import MoonshineStreamingEncoder

from sinkformers import set_n_iters, to_sinkformer, to_transformer, watch_attention
from tests.conversion.hugging_face_models import TEXT, build, inputs, output

EXACT = 1e-10  # float64; some 10⁴ roundings on values up to 10²

SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3}
REFUSED = r"^sinkformers: {}: attn_mask must not order the tokens.*`select`.*allow_one_way_mask=True"


def moonshine(*windows):
    """Return an encoder of 20 audio frames; `windows` are the frames to the left and to the right, per layer."""
    config = MoonshineStreamingEncoder.config_class(**SIZES, num_key_value_heads=3, head_dim=8, sliding_windows=windows)
    audio = torch.randn(1, 19 * 320 + 80, dtype=torch.float64)  # up to the last sample of the last frame
    return MoonshineStreamingEncoder(config), audio, {"attention_mask": torch.ones_like(audio).long()}


def nemotron(lookahead):
    """Return an encoder of 25 frames in chunks of `lookahead` + 1 that attend to earlier chunks, no convolutions."""
    features = {"num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 1}
    config = hf.NemotronAsrStreamingEncoderConfig(**SIZES, **features, default_num_lookahead_tokens=lookahead)
    return hf.NemotronAsrStreamingEncoder(config), torch.randn(1, 192, 16, dtype=torch.float64), {}


STREAMS = {
    "moonshine (16, 4)": lambda: moonshine((16, 4), (16, 4)),
    "moonshine (16, 0)": lambda: moonshine((16, 0), (16, 0)),
    "nemotron, 3 frames ahead": lambda: nemotron(3),
    "nemotron, none ahead": lambda: nemotron(0),
}


def sharpen(model):
    """Initialise a model so that its attention is far from uniform."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)


def stream(name):
    """Return a streaming encoder in float64, its input, and its output with SoftMax."""
    model, sound, options = STREAMS[name]()
    sharpen(model)
    model.set_attn_implementation("sdpa")
    model.double().eval()
    return model, sound, options, model(sound, **options).last_hidden_state


def influence(model, sound, options):
    """Return by how much the last sample changes the third frame."""
    other = sound.clone()
    other[:, -1] += 1.0
    frames = [model(given, **options).last_hidden_state[:, 2] for given in (sound, other)]
    return (frames[0] - frames[1]).abs().max().item()


@pytest.mark.parametrize("name", STREAMS)
def test_streaming_encoders_are_refused_because_outputs_would_depend_on_later_frames(name):
    model, sound, options, before = stream(name)
    assert influence(model, sound, options) == 0
    to_sinkformer(model, 3)
    assert len(model.sinkformer_report.converted) == 2
    kind = next(iter(model.sinkformer_report.converted.values())).kind
    with pytest.raises(NotImplementedError, match=REFUSED.format(kind)):
        model(sound, **options)
    with pytest.raises(NotImplementedError, match=REFUSED.format(kind)), watch_attention(model):
        model(sound, **options)
    allowed = to_sinkformer(copy.deepcopy(model), 3, allow_one_way_mask=True)
    assert influence(allowed, sound, options) > 1e-9  # float64: thousands of roundings
    set_n_iters(model, 1)
    assert_close(model(sound, **options).last_hidden_state, before, atol=EXACT, rtol=0)
    assert to_transformer(model)(sound, **options).last_hidden_state.equal(before)


def test_windows_with_equal_sides_pass():
    model, sound, options = moonshine((6, 6), (6, 6))
    to_sinkformer(model.double().eval(), 3)(sound, **options)


def test_the_setting_is_saved_and_loaded(tmp_path):
    model = to_sinkformer(build("bert"), 5, allow_one_way_mask=True).eval()
    assert model.config.sinkhorn == {"n_iters": 5, "tau": 1.0, "allow_one_way_mask": True}
    model.save_pretrained(tmp_path)
    loaded = hf.BertModel.from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    triangle = torch.ones(3, 1, 11, 11, dtype=torch.bool).tril()
    given = {"input_ids": inputs("bert")["input_ids"], "attention_mask": triangle}
    expected = model(**given).last_hidden_state
    assert_close(loaded(**given).last_hidden_state, expected, atol=EXACT, rtol=0)
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["sinkhorn"]["allow_one_way_mask"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    loaded = hf.BertModel.from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=REFUSED.format("BertSelfAttention")):
        loaded(**given)
    assert_close(output("bert", loaded), output("bert", model), atol=EXACT, rtol=0)
    config = hf.BertConfig(**TEXT, sinkhorn={"allow_one_way_mask": "yes"})
    with pytest.raises(TypeError, match=r"config\.sinkhorn: allow_one_way_mask must be True or False"):
        hf.BertModel._from_config(config, attn_implementation="sinkhorn")(**given)


class OwnSoftmax(nn.Module):
    """Attention that calls SoftMax itself, in a class that could be vit-pytorch's."""

    __module__ = "vit_pytorch.own_softmax"

    def __init__(self):
        super().__init__()
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x, mask):
        return self.attend((x @ x.mT).masked_fill(~mask, torch.finfo(x.dtype).min)) @ x


def test_scores_that_a_model_masks_itself():
    model, x = to_sinkformer(OwnSoftmax(), 5), torch.randn(2, 3, 7, 4)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    for mask in (j <= i, j >= i, (j <= i) & (j < 5), (j - i <= 1) & (i - j <= 3)):
        with pytest.raises(NotImplementedError, match=REFUSED.format("SinkhornOwnSoftmax")):
            model(x, mask)
        assert to_sinkformer(copy.deepcopy(model), 5, allow_one_way_mask=True)(x, mask).isfinite().all()
    for mask in ((i - j).abs() <= 2, (j < 5).expand(7, 7), (j < 1).expand(7, 7), i // 3 == j // 3):
        assert model(x, mask).isfinite().all()
