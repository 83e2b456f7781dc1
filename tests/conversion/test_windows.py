"""Symmetric sliding windows of Hugging Face encoders: Sinkhorn under the window's mask."""

import copy

import pytest
import torch
from torch.testing import assert_close

from sinkformers import to_sinkformer

hf = pytest.importorskip("transformers")
N, WINDOW = 23, 8
SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3}
TOKENS = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}


def modern_bert(**settings):
    config = hf.ModernBertConfig(**SIZES, **TOKENS, local_attention=WINDOW, global_attn_every_n_layers=2)
    return hf.ModernBertModel._from_config(config, **settings).double().eval()


def text(n=N):
    return torch.randint(3, 53, (2, n), generator=torch.Generator().manual_seed(0))


def test_all_layers_are_converted_and_one_iteration_is_the_original():
    model, words = modern_bert(), text()
    valid = torch.arange(N) < torch.tensor([[N], [17]])
    converted = to_sinkformer(copy.deepcopy(model), n_iters=1)
    assert len(converted.sinkformer_report.converted) == 3
    found, original = (each(words, attention_mask=valid.long()).last_hidden_state for each in (converted, model))
    assert_close(found[valid], original[valid], atol=0, rtol=0)


def test_padding_is_deletion_under_a_window():
    model, words = to_sinkformer(modern_bert(), n_iters=3), text()
    valid = torch.arange(N) < torch.tensor([[N], [17]])
    padded = model(words, attention_mask=valid.long()).last_hidden_state[1, :17]
    assert_close(padded, model(words[1:, :17]).last_hidden_state[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("n", [3, N])
def test_loaded_by_name_it_is_the_converted_model(n):
    converted, words = to_sinkformer(modern_bert(), n_iters=3), text(n)
    named = modern_bert(attn_implementation="sinkhorn")
    named.load_state_dict(converted.state_dict())
    found, expected = (each(words).last_hidden_state for each in (named, converted))
    assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_window_that_the_mask_does_not_show_is_refused():
    """Attention functions that get no mask take the window from the module; ours has no definition of its own."""
    attention = to_sinkformer(modern_bert(), n_iters=3).layers[1].attn
    hidden = torch.randn(1, N, SIZES["hidden_size"], dtype=torch.float64)
    positions = torch.randn(2, 1, N, SIZES["hidden_size"] // SIZES["num_attention_heads"], dtype=torch.float64)
    with pytest.raises(
        NotImplementedError, match=r"asks for a window of \d+ tokens, which its mask does not show.*sdpa"
    ):
        attention(hidden, position_embeddings=tuple(positions), attention_mask=None)
