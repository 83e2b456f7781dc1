"""Private attributes that another version of torch or transformers may not have: an error, and never silent SoftMax."""

import pytest
import torch
from torch import nn

from sinkformers import MultiheadAttention, to_sinkformer, to_transformer

NO_ATTRIBUTE = r"MultiheadAttention: nn.MultiheadAttention of torch .* has no attribute _qkv_same_embed_dim"


def test_building_without_the_attribute_that_keeps_the_fused_kernel_off(monkeypatch):
    original = nn.MultiheadAttention.__init__

    def without(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.__dict__.pop("_qkv_same_embed_dim")

    monkeypatch.setattr(nn.MultiheadAttention, "__init__", without)
    with pytest.raises(RuntimeError, match=NO_ATTRIBUTE):
        MultiheadAttention(8, 2)


def test_converting_without_the_attribute_that_keeps_the_fused_kernel_off():
    model = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
    del model[1].self_attn.__dict__["_qkv_same_embed_dim"]
    with pytest.raises(RuntimeError, match=NO_ATTRIBUTE):
        to_sinkformer(model)
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model)
    assert not any(hasattr(layer.self_attn, "sinkhorn") for layer in model)


def test_the_fused_kernel_is_off_if_torch_initialises_by_another_method(monkeypatch):
    monkeypatch.setattr(MultiheadAttention, "_reset_parameters", lambda _self: None)
    assert MultiheadAttention(8, 2)._qkv_same_embed_dim is False


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_without_the_setting_of_nested_tensors_can_be_converted():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1)
    del encoder.use_nested_tensor
    to_sinkformer(encoder)
    assert not hasattr(encoder, "use_nested_tensor")
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    with pytest.raises(TypeError, match="must be a dense tensor; got a nested one"):
        encoder.layers[0].self_attn(nested, nested, nested)
    to_transformer(encoder)
    assert type(encoder.layers[0].self_attn) is nn.MultiheadAttention


@pytest.mark.parametrize("widths", [{}, {"kdim": 5}])
def test_parameters_can_be_reset(widths):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(8, 2, **widths)
    torch.manual_seed(1)
    ours = MultiheadAttention(8, 2, **widths)
    for reset in (False, True):
        if reset:
            for layer in (theirs, ours):
                torch.manual_seed(2)
                layer._reset_parameters()
        for name, parameter in theirs.named_parameters():
            assert ours.get_parameter(name).equal(parameter)
        assert ours._qkv_same_embed_dim is False


def test_a_transformers_that_names_attention_functions_elsewhere(monkeypatch):
    hf = pytest.importorskip("transformers", reason="the hf extra is not installed")
    from tests.conversion.hugging_face_models import build

    model = build("bert")
    elsewhere = property(lambda _self: "sdpa", lambda _self, _value: None)
    monkeypatch.setattr(hf.PreTrainedConfig, "_attn_implementation", elsewhere)
    with pytest.raises(RuntimeError, match="BertConfig of this version of transformers does not read"):
        to_sinkformer(model)
    assert not any("sinkhorn" in module.__dict__ for module in model.modules())


def test_a_transformers_that_always_skips_causal_masks(monkeypatch):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from sinkformers.conversion import hugging_face_registry

    monkeypatch.setattr(hugging_face_registry, "sdpa_mask", lambda **_options: None)
    with pytest.raises(RuntimeError, match="sdpa_mask of this version of transformers has no argument"):
        hugging_face_registry.register()
