"""Small decoders of Hugging Face transformers with random weights, for tests of causal conversion."""

import torch
import transformers as hf

SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
ROTARY = {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
GPT = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 53, "n_positions": 64, **TOKENS}
WINDOW = {**ROTARY, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
OPT = {
    "hidden_size": 24, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 53,
    "word_embed_proj_dim": 24, "max_position_embeddings": 64, **TOKENS,
}  # fmt: skip

DECODERS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**ROTARY)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**ROTARY)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**ROTARY)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**WINDOW, attn_logit_softcapping=2.0)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**WINDOW)),
}
# Their attention modules name the cache otherwise.
LAYER_PAST = {
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES, **TOKENS, max_position_embeddings=64)),
    "gpt_bigcode": lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**GPT)),
    "ctrl": lambda: hf.CTRLLMHeadModel(hf.CTRLConfig(**{**GPT, "dff": 32})),
}
PROMPT = torch.tensor([[0, 0, 0, 7, 23, 41], [12, 35, 9, 50, 6, 17]])  # the first is padded on the left
VALID = PROMPT > 0


def build_decoder(name):
    """Return a decoder in float64 whose attention is far from uniform, in evaluation mode."""
    torch.manual_seed(0)
    model = {**DECODERS, **LAYER_PAST}[name]()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and "pos" not in key:
            torch.nn.init.normal_(parameter, std=0.3)
    model.set_attn_implementation("eager" if name == "gemma2" else "sdpa")  # soft caps are eager attention's only
    return model.double().eval()


def generate(model, ids=PROMPT, mask=VALID, **options):
    """Return generated tokens, and their scores before any are chosen."""
    torch.manual_seed(5)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask.long(), **{**settings, **options})
    return out.sequences, torch.stack(out.logits)
