"""`sinkformers predict`: answers and attention are those of the model, and errors are one sentence."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from sinkformers import watch_attention
from sinkformers.lab.artefacts import catalogue, figure4, record_json, selection
from sinkformers.lab.artefacts.artefact import retrain_hint
from sinkformers.lab.cli.app import app
from sinkformers.lab.data import load_opinions, on_unit_sphere
from sinkformers.lab.inference.clouds import CloudClassifier
from sinkformers.lab.inference.texts import Judge, Translate
from sinkformers.lab.inference.trained import open_run
from sinkformers.lab.tasks.augmentation import standardised
from sinkformers.lab.tasks.vocabulary import END, Vocabulary
from sinkformers.lab.workbench import checkpoint

SMOKE = figure4.FIGURE4.presets["smoke"]
AUTHORS = replace(SMOKE, config=replace(SMOKE.config, authors=True))
SHAPES = ("bowl", "chair", "lamp", "vase", "tent")


def write_untrained(out, artefact_name, arm_name):
    """Return the folder, the files and the model of a finished run with random weights."""
    artefact = catalogue.find(artefact_name)
    preset = artefact.presets["smoke"]
    arms = [run.arm for run in selection.select_runs(artefact, "smoke", n_iters="inf")]
    arm = next(arm for arm in (*preset.arms, *arms) if arm.name == arm_name)
    config = preset.config.with_settings(arm.settings)
    torch.manual_seed(3)
    if artefact_name.startswith("table1"):
        model, files = config.model(len(SHAPES)), {"classes.json": json.dumps(SHAPES).encode()}
    else:
        task = artefact.task(preset, arm, 0, None)
        model, files = task.model(), task.files() if hasattr(task, "files") else {}
    folder = out / artefact_name / "smoke" / arm_name / "seed-0"
    folder.mkdir(parents=True)
    metrics = {
        "artefact": artefact_name,
        "preset": "smoke",
        "arm": arm_name,
        "metric": artefact.metric,
        "seed": 0,
        "settings": dict(arm.settings),
        "config": asdict(config),
        "epochs": [{"epoch": 0, "test": {artefact.metric: 0.5}}],
    }
    for name, content in {**files, "metrics.json": record_json.dumps(metrics).encode()}.items():
        (folder / name).write_bytes(content)
    checkpoint.write(folder / "model.safetensors", model.state_dict(), {})
    return folder, model.eval()


def invoke(*arguments, **options):
    return CliRunner().invoke(app, ["predict", *map(str, arguments)], **options)


def refused(result):
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("sinkformers: ")


@pytest.fixture
def shape(tmp_path):
    """Return as many points as the models take."""
    points = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    np.save(tmp_path / "shape.npy", points.numpy())
    return tmp_path / "shape.npy", points


@pytest.mark.parametrize(
    ("artefact", "arm"), [("table1-set", "n-3"), ("table1-pct", "port-n-2"), ("table1-set", "n-inf")]
)
def test_the_classes_of_a_shape_are_those_of_the_model(artefact, arm, shape, tmp_path):
    folder, model = write_untrained(tmp_path, artefact, arm)
    file, points = shape
    given = on_unit_sphere(points)[None]  # their order does not matter
    given = standardised(given) if artefact == "table1-set" else given
    likely = model(given)[0].softmax(-1).detach()
    result = invoke(folder, file, "--top", 2, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    for number in likely.topk(2).indices.tolist():
        assert [SHAPES[number], f"{float(likely[number]):.1%}"] in rows
    assert [SHAPES[int(likely.argmin())], f"{float(likely.min()):.1%}"] not in rows
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page.replace("http-equiv", "")
    assert (tmp_path / "out" / "01-shape.npy.png").read_bytes().startswith(b"\x89PNG")


def test_points_are_coloured_by_the_attention_they_receive(shape, tmp_path):
    folder, model = write_untrained(tmp_path, "table1-set", "n-1")
    classifier, (file, _) = CloudClassifier(open_run(folder)), shape
    prediction = classifier.predict(file)
    with watch_attention(model, keep_weights=True) as watch:
        model(standardised(prediction.points[None]))
    weights = watch["sab.mab"].calls[0].weights[0].mean(0)
    assert weights.shape == (48, 48)
    assert prediction.attention.layer == "sab.mab"
    assert_close(prediction.attention.shares, weights.sum(0))
    assert_close(classifier.predict(file, point=7).attention.shares, 48 * weights[:, 7])
    induced = watch["encoder.1.induce"].calls[0].weights[0].mean(0)
    assert_close(classifier.predict(file, layer="encoder.1.induce").attention.shares, induced.sum(0) * 48 / 8)


def test_attention_is_drawn_at_the_centres(shape, tmp_path):
    folder, _ = write_untrained(tmp_path, "table1-pct", "n-3")
    prediction = CloudClassifier(open_run(folder)).predict(shape[0])
    places = prediction.attention.places
    assert places.shape == (12, 3)
    assert (places[:, None] == prediction.points).all(-1).any(-1).all()
    assert len(places.unique(dim=0)) == 12


@pytest.mark.parametrize("arm", ["n-3", "n-inf"])
def test_reviews_get_the_same_answer_alone_together_and_from_a_file(arm, tmp_path):
    folder, model = write_untrained(tmp_path, "figure4", arm)
    lines = [*load_opinions().test.texts[:3], "", "Ähnlich!"]
    judge = Judge(open_run(folder))
    for line in filter(None, lines):
        with torch.no_grad():
            logits = model(torch.tensor(judge.reader.vocabulary.encode([line])))[0]
        expected = f"{('neg', 'pos')[int(logits.argmax())]}\t{float(logits.softmax(-1).max()):.3f}"
        assert judge([line]) == [expected]
    alone = [judge([line])[0] if line else "" for line in lines]
    file = tmp_path / "reviews.txt"
    file.write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    for result in (
        invoke(folder, "--file", file),
        invoke(folder, input="\n".join(lines)),
        invoke(folder, *lines),
    ):
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == alone


def test_sentences_are_translated_line_by_line_and_drawn_on_request(tmp_path):
    folder, _ = write_untrained(tmp_path, "table2", "continued-n-3")
    result = invoke(folder, "elf", "neunhundertzwölf", "--draw", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "index.html",
        "01-elf.png",
        "02-neunhundertzwölf.png",
    }
    assert not (tmp_path / "predictions").exists()


def test_the_attention_of_a_sentence_is_that_of_the_encoder(tmp_path):
    folder, model = write_untrained(tmp_path, "table2", "continued-n-3")
    translate = Translate(open_run(folder))
    numbers = [*translate.translator.source.encode(["elf"])[0], END]
    with watch_attention(model, keep_weights=True) as watch:
        model.begin(torch.tensor([numbers]), torch.ones(1, len(numbers), dtype=torch.bool))
    first = next(iter(watch))
    seen = translate.attention("elf", first)
    assert "".join(seen.tokens) == "elf(end)"
    assert_close(seen.weights, watch[first].calls[0].weights[0].mean(0))


def test_a_run_at_the_limit_is_opened_as_one_and_not_with_other_weights(tmp_path):
    folder, model = write_untrained(tmp_path, "figure4", "n-inf")
    assert open_run(folder).config.n_iters == math.inf
    checkpoint.write(folder / "model.safetensors", model.state_dict(), {"settings": {"n_iters": math.inf}})
    assert Judge(open_run(folder))(["good"])
    checkpoint.write(folder / "model.safetensors", model.state_dict(), {"settings": {"n_iters": 3}})
    assert "was trained with n_iters 3, and metrics.json has n_iters inf" in refused(invoke(folder, "good"))


def test_a_model_of_subwords_warns_once_about_plain_text(tmp_path):
    folder, _ = write_untrained(tmp_path, "table2", "continued-n-3")
    pieces = Vocabulary.given(["ein hun@@ d"])
    for side in ("source", "target"):
        (folder / f"{side}.json").write_text(pieces.to_json())
    weights, note = checkpoint.read(folder / "model.safetensors")
    for name in ("source.weight", "target.weight"):
        weights[name] = weights[name][: pieces.size]
    checkpoint.write(folder / "model.safetensors", weights, note)
    result = invoke(folder, input="Ein Hund\nDer Hund\n")
    assert result.exit_code == 0
    assert result.stderr.count("most words of a text are unknown to this model") == 1
    assert invoke(folder, "ein hun@@ d").stderr == ""
    assert Translate(open_run(folder)).attention("ein Hund").tokens == ["ein", "(unknown)", "(end)"]


def test_the_name_of_a_file_is_read_as_a_text_with_a_hint(tmp_path):
    folder, _ = write_untrained(tmp_path, "figure4", "n-3")
    file = tmp_path / "reviews.txt"
    file.write_text("fine\n")
    result = invoke(folder, str(file), "a\0b", "fine" * 999, "ä" * 200)
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 4)
    assert "reviews.txt is read as a text; use --file to read the lines of a file." in result.stderr


def test_errors_are_one_sentence(shape, tmp_path):
    shapes, _ = write_untrained(tmp_path / "a", "table1-set", "n-3")
    texts, _ = write_untrained(tmp_path / "a", "figure4", "n-1")
    images, _ = write_untrained(tmp_path / "b", "figure6", "patch-4-rate-0.001-n-1")
    few = tmp_path / "few.xyz"
    few.write_text("0 0 0\n1 0 0\n")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"fine\nna\xefve\n")
    for arguments, sentence in (
        ([tmp_path / "nowhere"], "holds no finished run; name the folder of one"),
        ([tmp_path / "a", shape[0]], "holds 2 finished runs, such as "),
        ([images, shape[0]], "cannot be read as an image"),
        ([shapes], "there is nothing to predict; name files with shapes"),
        ([shapes, tmp_path / "no.off"], "no.off cannot be read (No such file or directory)"),
        ([shapes, few], "few.xyz has 2 points, and the model was trained with 48; give a mesh, or more points."),
        ([shapes, shape[0], "--point", 48], "--point must be a number from 0 to 47; got 48."),
        ([shapes, shape[0], "--layer", "x"], "no layer 'x' attends to points. These do: encoder.0.induce, "),
        ([shapes, shape[0], "--layer", "encoder.1.induce", "--point", 1], "points do not attend to points"),
        ([shapes, "--file", few], "--file is for texts"),
        ([texts, "--file", tmp_path / "no.txt"], "no.txt cannot be read (No such file or directory)"),
        ([texts, "--file", latin], "latin.txt is not UTF-8 in line 2"),
        ([texts, "a", "--file", latin], "give texts as INPUT or with --file, not both."),
        ([texts, "a", "na\udcefve"], "INPUT 2 is not UTF-8; convert it"),
        ([texts, "a", "--point", 1], "--point is for shapes; leave it out."),
        ([texts, "a", "--layer", "x"], "--layer is for pictures; add --draw."),
        ([texts, "a", "--draw", "--layer", "x"], "there is no layer 'x'. Choose one of encoder.layers.0"),
    ):
        result = invoke(*arguments)
        assert sentence in refused(result), arguments
        assert not result.stdout or "--file" in arguments  # lines before a bad one are answered


def test_weights_of_another_model_are_refused(shape, tmp_path):
    folder, _ = write_untrained(tmp_path / "a", "table1-set", "n-3")
    other, _ = write_untrained(tmp_path / "b", "table1-pct", "n-3")
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    assert "model.safetensors belongs to another model: attention.0.key.weight is (" in refused(
        invoke(folder, shape[0])
    )
    (folder / "model.safetensors").write_bytes(b"short")
    assert "is damaged" in refused(invoke(folder, shape[0]))
    (folder / "classes.json").write_text("[")
    assert "classes.json cannot be read" in refused(invoke(folder, shape[0]))
    (folder / "classes.json").unlink()
    assert f"classes.json is missing, and the model cannot be used without it. {retrain_hint(folder)}" in refused(
        invoke(folder, shape[0])
    )


def test_weights_of_another_arm_and_missing_weights_are_refused(tmp_path):
    folder, model = write_untrained(tmp_path, "figure4", "n-3")
    checkpoint.write(folder / "model.safetensors", model.state_dict(), {"settings": {"n_iters": 1}})
    assert "was trained with n_iters 1, and metrics.json has n_iters 3." in refused(invoke(folder, "a"))
    checkpoint.write(folder / "model.safetensors", model.state_dict(), {"settings": {"n_iters": 3}})
    assert invoke(folder, "a").exit_code == 0
    (folder / "model.safetensors").unlink()
    assert f"model.safetensors is missing. {retrain_hint(folder)}" in refused(invoke(folder, "a"))


def test_tokens_are_counted_as_they_are_read(tmp_path):
    reviews, _ = write_untrained(tmp_path, "figure4", "n-3")
    read = Judge(open_run(reviews)).reader
    breaks = "<br />" * 20
    assert len(read.vocabulary.encode([breaks])[0]) > read.config.length > int(read.encode([breaks]).lengths)
    assert invoke(reviews, breaks).stderr == ""
    sentences, _ = write_untrained(tmp_path, "table2", "continued-n-3")
    spell = Translate(open_run(sentences)).translator.source.encode
    text = next(each for n in range(200) if len(spell([each := "x" * n])[0]) == 64)  # and its end is one more
    assert "the last 64 tokens" in invoke(sentences, text).stderr
    assert "the last 64 tokens" not in invoke(sentences, text[1:]).stderr


def test_drawing_does_not_change_a_model_of_the_authors(tmp_path):
    task = figure4.task(AUTHORS, AUTHORS.arms[1], 0, None)
    folder, _ = write_untrained(tmp_path, "figure4", "n-3")
    checkpoint.write(folder / "model.safetensors", task.model().state_dict(), {})
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics["config"]["authors"] = True
    (folder / "metrics.json").write_text(json.dumps(metrics))
    judge = Judge(open_run(folder))
    before = judge(["a fine film", "dull"])
    seen = judge.attention("a fine film")
    assert seen.weights.shape == (len(seen.tokens), len(seen.tokens))
    assert_close(seen.weights.sum(1), torch.ones(len(seen.tokens)))
    assert judge(["a fine film", "dull"]) == before
    assert invoke(folder, "a fine film", "--draw", "--out", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(("artefact", "part"), [("figure4", "first 32"), ("table2", "last 64")])
def test_a_truncated_text_is_reported_once(tmp_path, artefact, part):
    folder, _ = write_untrained(tmp_path, artefact, "n-3" if artefact == "figure4" else "continued-n-3")
    long = "elf " * 99
    result = invoke(folder, "--file", "-", "--draw", "--out", tmp_path / "out", input=f"{long}\nelf\n{long}")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == f"sinkformers: the {part} tokens of a text are read, and some have more."
    notes = [line for line in result.stderr.splitlines() if "vocabulary" not in line]
    assert len(notes) == 2
    assert len(result.stdout.splitlines()) == 3
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<h2>elf</h2>" in page
    assert "elf elf …</h2>" in page
    assert long.strip() not in page
    assert "are read" not in invoke(folder, "elf").stderr


def test_words_that_a_model_does_not_know_are_counted(tmp_path):
    folder, _ = write_untrained(tmp_path, "figure4", "n-3")
    words = "film xylophone film zyzzyva xylophone"
    for result in (invoke(folder, words), invoke(folder, "--file", "-", input=words.replace(" ", "\n"))):
        assert result.stderr == (
            "sinkformers: 3 of 5 words are not in the vocabulary of this model, which reads them in pieces or not at "
            "all (xylophone, zyzzyva).\n"
        )
    assert invoke(folder, "film film").stderr == ""


def test_damaged_records_and_vocabularies_are_refused(tmp_path):
    folder, _ = write_untrained(tmp_path, "figure4", "n-1")
    (folder / "vocabulary.json").write_text('{"model": 3}')
    assert "vocabulary.json cannot be read" in refused(invoke(folder, "a"))
    metrics = json.loads((folder / "metrics.json").read_text())
    for config in ({**metrics["config"], "recipe": {"pace": 3}}, None):
        (folder / "metrics.json").write_text(json.dumps({**metrics, "config": config}))
        assert "holds no configuration that this version can read" in refused(invoke(folder, "a"))


@pytest.mark.parametrize("arm", ["rotary-n-3", "rotary-tau-learned-n-3", "rotary-prefix-n-3"])
def test_a_language_model_continues_prompts(tmp_path, arm):
    folder, model = write_untrained(tmp_path, "causal-lm", arm)
    result = invoke(folder, "Once", "", "Üb", "--tokens", 9, "--temperature", 0)
    assert result.exit_code == 0, result.output
    expected = []
    for prompt in ("Once", "Üb"):
        tokens = torch.tensor([list(prompt.encode())])
        for _ in range(9):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        text = bytes(tokens[0, len(prompt.encode()) :].tolist()).decode("utf-8", "replace")
        expected.append(prompt + " ".join(text.splitlines()))
    assert result.stdout == f"{expected[0]}\n\n{expected[1]}\n"


def test_drawn_texts_follow_their_seed_and_fit_into_the_context(tmp_path):
    folder, model = write_untrained(tmp_path, "causal-lm", "rotary-n-1")
    first, second, third = (invoke(folder, "Once", "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == second != third
    result = invoke(folder, "a" * 70, "--tokens", 500, "--temperature", 0)
    assert "the last 32 bytes of a prompt are read, and some have more" in result.stderr
    assert result.stdout.startswith("a" * 70)
    assert len(result.stdout.encode()) >= 70 + model.length - 32


def test_language_models_draw_nothing_and_recall_writes_no_text(tmp_path):
    folder, _ = write_untrained(tmp_path, "causal-lm", "rotary-n-1")
    assert refused(invoke(folder, "Once", "--draw")).startswith("--point, --layer and --draw are for other models")
    metrics = record_json.loads((folder / "metrics.json").read_text())
    metrics["config"]["pairs"] = 5
    (folder / "metrics.json").write_text(record_json.dumps(metrics))
    result = invoke(folder, "Once")
    assert "is a model of associative recall, which writes no text" in str(result.exception) + result.stderr
