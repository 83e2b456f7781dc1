"""`sinkformers predict` for images: classes and attention are those of the model, and bad files are one sentence."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from typer.testing import CliRunner

from sinkformers import watch_attention
from sinkformers.lab.artefacts import selection
from sinkformers.lab.artefacts.digits import DIGITS
from sinkformers.lab.cli.app import app
from sinkformers.lab.data import load_digits
from sinkformers.lab.inference.images import ImageClassifier, initial_model
from sinkformers.lab.inference.trained import open_run
from sinkformers.lab.reporting import attention_maps, records
from sinkformers.lab.reporting.summary import summarise
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.runner import train_missing


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Return an output folder with the smoke runs of `digits`, trained."""
    folder = tmp_path_factory.mktemp("runs")
    runs = selection.select_runs(DIGITS, "smoke")
    train_missing(DIGITS, "smoke", runs, data=None, out=folder, display=Display(quiet=True), save_every=60.0)
    return folder


@pytest.fixture(scope="module")
def run(out):
    return out / "digits/smoke/n-3/seed-0"


def invoke(*arguments):
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


def refused(result):
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_an_example_is_read_as_the_test_image_that_it_is(run):
    images = load_digits().test
    classifier = ImageClassifier(open_run(run))
    for label in (0, 7):
        first = images.pixels[(images.labels == label).nonzero()[0]][0]
        prediction = classifier.predict(run / f"example-{label}.png")
        assert torch.equal(prediction.pixels, first)


def test_the_answer_and_the_attention_are_those_of_the_model(run):
    classifier = ImageClassifier(open_run(run))
    prediction = classifier.predict(run / "example-3.png", layer="blocks.0.attention")
    scaled = (prediction.pixels.double() / 255 - classifier.mean.double()) / classifier.std.double()
    with torch.no_grad(), watch_attention(classifier.model, keep_weights=True) as watch:
        logits = classifier.model(scaled.float()[None])
    weights = watch["blocks.0.attention"].calls[0].weights[0, 0]
    assert_close(prediction.attention.weights, weights)
    assert_close(prediction.attention.received.flatten(), weights.sum(0)[1:])  # the first token is CLS
    assert dict(prediction.classes)[str(int(logits.argmax()))] == prediction.classes[0][1]
    assert sum(likely for _, likely in prediction.classes) == pytest.approx(1)


def test_the_untrained_model_is_the_one_that_was_trained(run):
    """Its column sums are those of epoch 0 in the record."""
    trained = open_run(run)
    images = load_digits()
    classifier = ImageClassifier(trained)
    batch = torch.cat([classifier.standardised(pixels) for pixels in images.test.pixels[:256]])
    model = initial_model(trained, 1)
    with torch.no_grad(), watch_attention(model) as watch:
        model(batch)
    gaps = [float((seen.calls[0].column_sums - 1).abs().mean()) for seen in watch.values()]
    recorded = [layer["gap"] for layer in trained.metrics["epochs"][0]["layers"]]
    assert gaps == pytest.approx(recorded, rel=1e-3, abs=1e-6)


def test_predict_prints_classes_and_draws(run, tmp_path):
    result = invoke(run, run / "example-3.png", run / "example-4.png", "--top", "2", "--out", tmp_path / "drawn")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("probability") == 2
    assert "<h2>example-3.png</h2>" in (tmp_path / "drawn/index.html").read_text(encoding="utf-8")
    assert len(list((tmp_path / "drawn").glob("*.png"))) == 2


def test_a_photograph_of_ink_on_paper_is_doubted(run, tmp_path):
    drawing = Image.new("RGB", (40, 30), "white")
    drawing.paste((20, 20, 20), (18, 5, 22, 25))
    drawing.save(tmp_path / "one.jpg")
    result = invoke(run, tmp_path / "one.jpg", "--no-draw")
    assert result.exit_code == 0, result.output
    assert "the square in the middle of one.jpg, 40 × 30, is resized to 8 × 8 for this model." in result.stderr
    assert "if its ground should be dark, try with --invert." in result.stderr
    assert "--invert" not in invoke(run, tmp_path / "one.jpg", "--no-draw", "--invert").stderr


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_images_of_every_mode_are_read(run, tmp_path, mode):
    file = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    Image.new(mode, (17, 11)).save(file)
    pixels = ImageClassifier(open_run(run)).predict(file).pixels
    assert pixels.shape == (1, 8, 8)
    transparent = mode in ("LA", "RGBA")  # becomes white
    assert pixels.unique().tolist() == [255 if transparent or mode == "CMYK" else 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file or directory); name an existing file."),
        (b"", "cannot be read as an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read as an image"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "cannot be read as an image"),
    ],
)
def test_a_file_that_is_no_image_is_refused(run, tmp_path, content, said):
    file = tmp_path / "image.png"
    if content is not None:
        file.write_bytes(content)
    assert said in refused(invoke(run, file))


def test_an_image_that_would_fill_memory_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    Image.new("1", (100, 100)).save(tmp_path / "huge.png")
    assert "it is larger than an image should be" in refused(invoke(run, tmp_path / "huge.png"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name files with images after the run, such as "),
        (("--file", "texts"), "--file is for texts and --point for shapes"),
        (("--point", "3"), "--file is for texts and --point for shapes"),
        (("EXAMPLE", "--layer", "x"), "there is no layer 'x'. Choose one of blocks.0.attention, blocks.1.attention."),
    ],
)
def test_other_arguments_are_refused(run, arguments, said):
    named = [str(run / "example-0.png") if each == "EXAMPLE" else each for each in arguments]
    assert said in refused(invoke(run, *named))


def test_a_run_without_statistics_of_pixels_is_refused(run, tmp_path):
    for file in run.iterdir():
        if file.is_file() and file.name != "pixels.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "images cannot be prepared without them" in refused(invoke(tmp_path, tmp_path / "example-0.png"))
    (tmp_path / "pixels.json").write_text(json.dumps({"mean": [0.5], "std": [0.0]}), encoding="utf-8")
    assert "std above 0" in refused(invoke(tmp_path, tmp_path / "example-0.png"))


def test_the_report_draws_attention_before_and_after(out, run, monkeypatch, tmp_path):
    [summary] = summarise(records.find([out]), lambda _name: DIGITS)
    maps = attention_maps.find(summary.records)
    assert maps is not None
    assert [one.n_iters for one in maps.sides] == [1, 3, float("inf")]
    limit = maps.sides[-1]
    assert_close(limit.after.sum(0), torch.ones(17), atol=2e-3, rtol=0)
    assert not torch.equal(limit.before, limit.after)
    drawn = attention_maps.draw(maps)
    assert [axes.get_title(loc="left").strip() for axes in drawn.axes[:3]] == [
        "SoftMax",
        "Sinkhorn\nn_iters = 3",
        "Sinkhorn\nn_iters = ∞",
    ]
    assert "Sinkhorn, n_iters = ∞ 1.00 to 1.00" in attention_maps.caption(maps)
    monkeypatch.chdir(run.parents[3])
    folder = "digits/smoke/n-inf/seed-0"
    assert attention_maps.commands(summary)[0][1] == f"sinkformers predict {folder} {folder}/example-0.png"
    monkeypatch.chdir(tmp_path)  # the runs are elsewhere: the command names their whole path
    named = shlex.split(attention_maps.commands(summary)[0][1])[2:]
    assert [Path(name).is_absolute() and Path(name).exists() for name in named] == [True, True]
    (run / "model.safetensors").rename(run / "away")
    try:
        assert attention_maps.find(summary.records) is None
    finally:
        (run / "away").rename(run / "model.safetensors")
