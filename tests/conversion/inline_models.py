"""Small models of Hugging Face transformers that compute SoftMax themselves, with inputs, in float64."""

import torch
import transformers as hf

from tests.conversion.hugging_face_models import IMAGE, TEXT, VALID, WINDOWS

LAYOUT = {"coordinate_size": 4, "shape_size": 4, "max_2d_position_embeddings": 60, "visual_embed": False}
XL = {"vocab_size": 53, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 32}
XLM = {"vocab_size": 53, "emb_dim": 24, "n_layers": 2, "n_heads": 3, "n_langs": 1, "pad_index": 0}
PYRAMID = {
    "image_size": 32,
    "hidden_sizes": [8, 12],
    "depths": [1, 1],
    "num_encoder_blocks": 2,
    "num_attention_heads": [1, 2],
    "sequence_reduction_ratios": [2, 1],
    "mlp_ratios": [2, 2],
    "patch_sizes": [4, 2],
    "strides": [4, 2],
}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}

TEXTS = {
    "deberta_v2": lambda: hf.DebertaV2Model(hf.DebertaV2Config(**TEXT, **DEBERTA)),
    "mpnet": lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)),
    "layoutlmv3": lambda: hf.LayoutLMv3Model(hf.LayoutLMv3Config(**TEXT, **LAYOUT)),
    "luke": lambda: hf.LukeModel(hf.LukeConfig(**TEXT, entity_vocab_size=7, entity_emb_size=24)),
    "rembert": lambda: hf.RemBertModel(hf.RemBertConfig(**TEXT, input_embedding_size=24)),
    "roformer": lambda: hf.RoFormerModel(hf.RoFormerConfig(**{**TEXT, "hidden_size": 48}, embedding_size=48)),
    "megatron_bert": lambda: hf.MegatronBertModel(hf.MegatronBertConfig(**TEXT)),
    "squeezebert": lambda: hf.SqueezeBertModel(
        hf.SqueezeBertConfig(**{**TEXT, "num_attention_heads": 4}, embedding_size=24)
    ),
    "xlm": lambda: hf.XLMModel(hf.XLMConfig(**XLM)),
    "xlnet": lambda: hf.XLNetModel(hf.XLNetConfig(**XL)),
}
IMAGES = {
    "swinv2": lambda: hf.Swinv2Model(hf.Swinv2Config(**WINDOWS)),
    "blip_vision": lambda: hf.BlipVisionModel(hf.BlipVisionConfig(**{**IMAGE, "image_size": 16})),
    "vitdet": lambda: hf.VitDetModel(hf.VitDetConfig(**{**IMAGE, "image_size": 16})),
    "pvt": lambda: hf.PvtModel(hf.PvtConfig(**PYRAMID)),
}


def build(name):
    """Return a model with sharper attention than a fresh one, without dropout, in float64."""
    torch.manual_seed(0)
    model = (TEXTS | IMAGES)[name]().eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and "pos" not in key:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def inputs(name, padded=True):
    generator = torch.Generator().manual_seed(3)
    if name in IMAGES:
        size = 32 if name == "pvt" else 16
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)}
    ids = torch.randint(5, 53, (3, 11), generator=generator)
    return {"input_ids": ids, **({"attention_mask": VALID.long()} if padded else {})}


def output(model, given):
    return model(**given).last_hidden_state
