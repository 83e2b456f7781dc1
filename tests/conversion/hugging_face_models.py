"""Small random models of Hugging Face transformers with inputs, in float64: tolerances are those of rounding."""

import torch
import transformers as hf

hf.logging.set_verbosity_error()

TEXT = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "image_size": 12,
    "patch_size": 4,
}
SEQ2SEQ = {
    "vocab_size": 53,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [3, 3], "window_size": 4}

VALID = torch.arange(11) < torch.tensor([[11], [7], [4]])


def distilbert():
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 32, "max_position_embeddings": 40}
    return hf.DistilBertModel(hf.DistilBertConfig(vocab_size=53, **sizes))


def clip():
    text = {**TEXT, "projection_dim": 12}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=dict(IMAGE), projection_dim=12))


def t5():
    sizes = {"vocab_size": 53, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 3}
    return hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **sizes))


BUILDERS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**TEXT)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT)),
    "distilbert": distilbert,
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**IMAGE)),
    "deit": lambda: hf.DeiTModel(hf.DeiTConfig(**IMAGE)),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**IMAGE)),
    "swin": lambda: hf.SwinModel(hf.SwinConfig(**WINDOWS)),
    "clip": clip,
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**SEQ2SEQ)),
    "t5": t5,
}
TEXTS = ("bert", "roberta", "distilbert")
TRANSLATORS = ("bart", "marian", "t5")


def build(name, implementation="sdpa"):
    """Return a model whose attention is far from uniform, but not sharp, so that normalisations can be told apart."""
    torch.manual_seed(0)
    model = BUILDERS[name]()
    model.set_attn_implementation(implementation)
    std = 0.1 if name == "t5" else 0.2  # T5 does not divide its scores by √d
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and "pos" not in key:
            torch.nn.init.normal_(parameter, std=std)
    return model.double()


def inputs(name, padded=True):
    """Return keyword arguments for `forward`. Images have no padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 53, (3, 11), generator=generator)
    mask = {"attention_mask": VALID.long()} if padded else {}
    size = 16 if name == "swin" else 12
    image = torch.randn(3, 3, size, size, generator=generator, dtype=torch.float64)
    if name in TEXTS:
        return {"input_ids": ids, **mask}
    if name in TRANSLATORS:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :5], **mask}
    return {"pixel_values": image} | ({"input_ids": ids, **mask} if name == "clip" else {})


def output(name, model, padded=True, **arguments):
    """Return the output at valid tokens: last hidden states, logits, or the similarities of CLIP."""
    out = model(**{**inputs(name, padded), **arguments})
    if name in TEXTS:
        return out.last_hidden_state[VALID] if padded else out.last_hidden_state
    if name == "clip":
        return out.logits_per_image
    return out.logits if name in TRANSLATORS else out.last_hidden_state
