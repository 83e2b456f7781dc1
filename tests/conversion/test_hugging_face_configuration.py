"""Settings in the configuration of Hugging Face models: saved, loaded, copied and pickled."""

import copy
import json
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers", reason="the hf extra is not installed")

import safetensors.torch
import transformers as hf

import sinkformers.hf  # noqa: F401  attn_implementation="sinkhorn"
from sinkformers import set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention
from tests.conversion.hugging_face_models import (
    BUILDERS,
    TEXT,
    VALID,
    build,
    inputs,
    output,
)

EXACT = 1e-10  # float64; some 10⁴ roundings on values up to 10²


@pytest.mark.filterwarnings("ignore:sinkformers.*clip_text_model:UserWarning")
@pytest.mark.parametrize("name", BUILDERS)
def test_saved_settings_are_loaded(name, tmp_path):
    model = to_sinkformer(build(name), 5, tau=0.75).eval()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    assert_close(output(name, loaded), output(name, model), atol=EXACT, rtol=0)
    set_n_iters(loaded, 7)
    set_n_iters(model, 7)
    assert_close(output(name, loaded), output(name, model), atol=EXACT, rtol=0)
    softmax = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    for other in (model, loaded):
        assert_close(output(name, to_transformer(other)), output(name, softmax), atol=EXACT, rtol=0)


@pytest.mark.parametrize("tau", [1.0, 0.75])
def test_the_limit_is_saved_as_a_text(tau, tmp_path):
    """JSON has no infinity."""
    model = to_sinkformer(build("bert"), math.inf, tau=tau).eval()
    expected = {"n_iters": "inf", "tau": tau}
    assert model.config.sinkhorn == expected
    model.save_pretrained(tmp_path)

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    assert json.loads((tmp_path / "config.json").read_text(), parse_constant=refuse)["sinkhorn"] == expected
    loaded = hf.BertModel.from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    assert loaded.config.sinkhorn == expected
    assert_close(output("bert", loaded), output("bert", model), atol=EXACT, rtol=0)
    with watch_attention(loaded) as watch:
        output("bert", loaded)
    assert all(call.residual is not None for layer in watch.values() for call in layer.calls)
    set_n_iters(loaded, 7)
    assert loaded.config.sinkhorn == {"n_iters": 7, "tau": tau}


@pytest.mark.parametrize("stored", ["inf", math.inf], ids=repr)
def test_a_configuration_may_have_the_limit_as_a_text_or_a_number(stored):
    config = hf.BertConfig(**TEXT, sinkhorn={"n_iters": stored})
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config, attn_implementation="sinkhorn").double().eval()
    torch.manual_seed(0)
    other = hf.AutoModel.from_config(hf.BertConfig(**TEXT)).double().eval()
    assert_close(output("bert", model), output("bert", to_sinkformer(other, math.inf)), atol=EXACT, rtol=0)


@pytest.mark.parametrize("stored", ["3", "infinity", math.nan, -math.inf], ids=repr)
def test_other_texts_in_a_configuration_are_refused(stored):
    model = build("bert", "sinkhorn")
    model.config.sinkhorn = {"n_iters": stored}
    with pytest.raises((TypeError, ValueError), match=r"config\.sinkhorn: n_iters must be .* or math\.inf; got"):
        output("bert", model)


def test_the_limit_of_single_modules_is_loaded(tmp_path):
    model = to_sinkformer(build("bert"), math.inf, select="*layer.1.*").eval()
    expected = output("bert", model)
    model.save_pretrained(tmp_path)
    loaded = hf.BertModel.from_pretrained(tmp_path, dtype=torch.float64)
    for module, settings in loaded.config.sinkhorn["modules"].items():
        to_sinkformer(loaded, **settings, select=module)
    assert_close(output("bert", loaded), expected, atol=EXACT, rtol=0)


def test_a_model_loaded_by_name_can_be_restored_too():
    model, plain = build("t5", "sinkhorn").eval(), build("t5").eval()
    assert (output("t5", model) - output("t5", plain)).abs().max() > 1e-3
    assert_close(output("t5", to_transformer(model)), output("t5", plain), atol=EXACT, rtol=0)
    assert not hasattr(model.config, "sinkhorn")


def test_settings_come_from_the_configuration():
    config = hf.BertConfig(**TEXT, sinkhorn={"n_iters": 5, "tau": 0.5})
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config, attn_implementation="sinkhorn").double().eval()
    torch.manual_seed(0)
    other = hf.AutoModel.from_config(hf.BertConfig(**TEXT)).double().eval()
    assert_close(output("bert", model), output("bert", to_sinkformer(other, 5, tau=0.5)), atol=EXACT, rtol=0)
    assert other.config.sinkhorn == config.sinkhorn


def test_parts_of_a_model_write_their_configuration_too():
    encoder = to_sinkformer(build("bert").encoder, 5, tau=0.5)
    assert encoder.config.sinkhorn == {"n_iters": 5, "tau": 0.5}
    to_transformer(encoder)
    assert not hasattr(encoder.config, "sinkhorn")


def test_the_configuration_follows_the_settings():
    model = to_sinkformer(hf.BertModel(hf.BertConfig(**TEXT)), 3)
    set_n_iters(model, 7)
    assert model.config.sinkhorn == {"n_iters": 7, "tau": 1.0}
    set_tau(model, 0.5)
    assert model.config.sinkhorn == {"n_iters": 7, "tau": 0.5}
    first = next(iter(model.sinkformer_report.converted))
    set_n_iters(model, 5, select=first)
    assert {name: settings["n_iters"] for name, settings in model.config.sinkhorn["modules"].items()} == {
        name: 5 if name == first else 7 for name in model.sinkformer_report.converted
    }


def test_partly_converted_models_list_their_modules_in_the_configuration(tmp_path):
    model = to_sinkformer(build("bert"), 5, select="*layer.1.*").eval()
    name = "encoder.layer.1.attention.self"
    assert model.config.sinkhorn == {"modules": {name: {"n_iters": 5, "tau": 1.0}}}
    assert model.sinkformer_report.kept == {"encoder.layer.0.attention.self": "not selected"}
    with watch_attention(model) as watch:
        expected = output("bert", model)
    assert list(watch) == [name]
    model.save_pretrained(tmp_path)
    loaded = hf.BertModel.from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"(?s)has settings for single modules.*to_sinkformer\(model, \*\*settings"):
        output("bert", loaded)
    loaded = hf.BertModel.from_pretrained(tmp_path, dtype=torch.float64)
    for module, settings in loaded.config.sinkhorn["modules"].items():
        to_sinkformer(loaded, **settings, select=module)
    assert_close(output("bert", loaded), expected, atol=EXACT, rtol=0)


def test_learned_tau_is_saved_and_loaded_as_a_parameter(tmp_path):
    model = to_sinkformer(build("bert"), tau="learned").eval()
    set_tau(model, 0.2)
    model.save_pretrained(tmp_path)
    loaded = hf.BertModel.from_pretrained(tmp_path, attn_implementation="sinkhorn", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"needs parameters.*load its state_dict"):
        output("bert", loaded)
    for fresh in (
        hf.BertModel(hf.BertConfig.from_pretrained(tmp_path)).double(),
        hf.BertModel.from_pretrained(tmp_path, dtype=torch.float64),
    ):
        with pytest.warns(UserWarning, match=r"tau was learned.*begin at tau=0\.5.*load_state_dict"):
            to_sinkformer(fresh.eval(), **fresh.config.sinkhorn)
        assert not torch.allclose(output("bert", fresh), output("bert", model), atol=1e-3)
        to_sinkformer(fresh, 5, tau="learned")  # says it once
        set_n_iters(fresh, 3)
        fresh.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=False)
        assert_close(output("bert", fresh), output("bert", model), atol=EXACT, rtol=0)


@pytest.mark.parametrize("stored", [5, {"iterations": 3}])
def test_a_wrong_configuration_is_refused(stored):
    model = build("bert", "sinkhorn")
    model.config.sinkhorn = stored
    with pytest.raises(ValueError, match=r"config\.sinkhorn must be a dictionary.*got"):
        output("bert", model)


def test_copies_pickles_and_other_processes(tmp_path):
    model = to_sinkformer(build("bert"), 5, tau=0.5).eval()
    expected = output("bert", model)
    assert output("bert", copy.deepcopy(model)).equal(expected)
    assert output("bert", pickle.loads(pickle.dumps(model))).equal(expected)
    other = to_transformer(copy.deepcopy(model))
    assert (output("bert", other) - expected).abs().max() > 1e-3
    torch.save({"model": model, "expected": expected, "inputs": inputs("bert"), "valid": VALID}, tmp_path / "saved.pt")
    code = (
        "import sys, torch; saved = torch.load(sys.argv[1], weights_only=False)\n"
        "out = saved['model'](**saved['inputs']).last_hidden_state[saved['valid']]\n"
        "assert torch.allclose(out, saved['expected'], rtol=0, atol=1e-10)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "saved.pt"], check=True)
