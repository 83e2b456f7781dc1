"""Models that compute SoftMax themselves: the call is replaced by Sinkhorn, and nothing else changes."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from tests import oracle
from tests.conversion.hugging_face_models import VALID
from tests.conversion.inline_models import IMAGES, TEXTS, build, inputs, output

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # by DeBERTa, as it is imported
ROUNDING = {"atol": 1e-5, "rtol": 0}  # XLM computes SoftMax in float32: 2⁻²⁴ per number, through two layers
CLONES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


def softmax_replaced(n_iters):
    """Replace torch's SoftMax of square matrices by the oracle, while the original model runs."""

    def softmax(scores, dim=None, *_, dtype=None, **__):
        assert dim in (-1, scores.dim() - 1)
        if scores.shape[-1] != scores.shape[-2]:
            return torch._softmax(scores, -1, False)
        return oracle.batch_weights(scores, n_iters).to(scores.dtype if dtype is None else dtype)

    return [mock.patch(name, softmax) for name in ("torch.nn.functional.softmax", "torch.Tensor.softmax")]


@pytest.mark.parametrize("name", [*TEXTS, *IMAGES])
def test_one_iteration_is_the_original_and_more_are_the_oracles(name):
    model, given = build(name), inputs(name, padded=False)
    before = output(model, given)
    one, two = softmax_replaced(5)
    with one, two:
        expected = output(model, given)
    to_sinkformer(model, 1)
    assert {entry.adapter for entry in model.sinkformer_report.converted.values()} == {"softmax"}
    assert output(model, given).equal(before)
    set_n_iters(model, 5)
    assert_close(output(model, given), expected, **ROUNDING)
    assert (expected - before).abs().max() > 1e-3
    set_tau(model, 0.0)
    assert output(model, given).equal(before)
    assert to_transformer(model)(**given).last_hidden_state.equal(before)


@pytest.mark.parametrize("name", TEXTS)
def test_padding_equals_deletion(name):
    model, given = build(name), inputs(name)
    softmax = output(model, given)
    to_sinkformer(model, 1)
    assert output(model, given).equal(softmax)
    set_n_iters(model, 5)
    together = output(model, given)
    for text, length in zip(range(3), VALID.sum(1).tolist(), strict=True):
        alone = output(model, {"input_ids": given["input_ids"][text : text + 1, :length]})
        assert_close(together[text, :length], alone[0], **ROUNDING)


@pytest.mark.parametrize("clone", CLONES)
@pytest.mark.parametrize("name", ["deberta_v2", "layoutlmv3", "swinv2"])
def test_copies_and_the_way_back(name, clone):
    model, given = build(name), inputs(name)
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    before = output(model, given)
    to_sinkformer(model, 5, tau=0.7)
    expected = output(model, given)
    other = CLONES[clone](model)
    assert output(other, given).equal(expected)
    assert list(other.state_dict()) == keys
    set_n_iters(other, 1)
    assert output(other, given).equal(before)
    assert output(model, given).equal(expected)
    to_transformer(model)
    assert output(model, given).equal(before)
    assert [type(module) for module in model.modules()] == types
    assert all("_sinkhorn" not in key for module in model.modules() for key in vars(module))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpnet", "vitdet"])
def test_compiled_whole_with_the_gradients_of_eager(name):
    model, given = to_sinkformer(build(name), 3), inputs(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    parameters = [parameter for key, parameter in model.named_parameters() if "attn.q." in key or "qkv" in key]
    weights = VALID[..., None] if name in TEXTS else 1.0
    found = [(each(**given).last_hidden_state * weights) for each in (model, compiled)]
    assert_close(*found, atol=1e-9, rtol=0)
    grads = [torch.autograd.grad(out.square().sum(), parameters, allow_unused=True) for out in found]
    assert_close(*grads, atol=1e-6, rtol=0)


def test_weights_are_watched_and_tau_is_learned():
    model, given = to_sinkformer(build("mpnet"), 21, tau="learned"), inputs("mpnet", padded=False)
    assert len(model.sinkformer_report.parameters) == 2
    output(model, given).square().sum().backward()
    taus = [parameter for key, parameter in model.named_parameters() if key.endswith("sinkhorn_tau")]
    assert all(tau.grad is not None and tau.grad.abs().max() > 0 for tau in taus)
    to_sinkformer(model, 201)
    with watch_attention(model) as watch, torch.no_grad():
        output(model, given)
    for module in watch.values():
        (call,) = module.calls
        assert call.column_sums.shape == (3, 3, 11)
        assert_close(call.column_sums, torch.ones(3, 3, 11, dtype=torch.float64), atol=1e-6, rtol=0)


def test_settings_are_saved_with_the_configuration():
    model = to_sinkformer(build("mpnet"), 5, tau=0.5)
    assert model.config.sinkhorn == {"n_iters": 5, "tau": 0.5}
    assert not hasattr(to_transformer(model).config, "sinkhorn")


def test_reduced_tokens_stay_softmax_with_their_reason():
    report = to_sinkformer(build("pvt"), 3).sinkformer_report
    assert len(report.converted) == len(report.kept) == 1
    assert "unequally many queries and keys" in next(iter(report.kept.values()))
