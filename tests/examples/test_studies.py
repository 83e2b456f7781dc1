"""The studies' bookkeeping on toy runs, and their readers on small files made here."""

import json
import math

import pytest
import torch

import adapt_minilm
import adapt_vit
import sinkformers
import study

ARMS = {"SoftMax": study.ARMS["SoftMax"], "last layer, at once": study.ARMS["at once"]}


def toy_run(arm, seed):
    found = {"accuracy": [0.5, 0.6 + seed / 10]}
    return {**found, "unadapted": {"tau 0.5": 0.55, "the limit": 0.45}} if arm == "SoftMax" else found


def forbidden(_arm, _seed):
    raise AssertionError("trained again")


def test_runs_are_trained_once_and_reported(tmp_path):
    study.run(tmp_path, ARMS, toy_run, seeds=3, workers=1)
    assert len(list((tmp_path / "runs").glob("*.json"))) == 6
    study.run(tmp_path, ARMS, forbidden, seeds=3, workers=1)
    table = study.report(tmp_path, ARMS)
    assert "| SoftMax | 70.0% | 60.0%, 70.0%, 80.0% |" in table
    assert "| SoftMax, then tau 0.5, un-adapted | 55.0% |" in table
    assert "| SoftMax, then the limit, un-adapted | 45.0% |" in table
    assert (tmp_path / "accuracy.png").stat().st_size > 1000


def test_only_missing_runs_are_trained(tmp_path):
    study.run(tmp_path, ARMS, toy_run, seeds=1, workers=1)
    lost = tmp_path / "runs" / "SoftMax-0.json"
    lost.unlink()
    study.run(tmp_path, ARMS, toy_run, seeds=1, workers=1)
    assert json.loads(lost.read_text())["seed"] == 0


def test_a_report_of_nothing_says_so(tmp_path):
    with pytest.raises(SystemExit, match="no finished run"):
        study.report(tmp_path, ARMS)


def test_arms_are_chosen_by_a_pattern(tmp_path, monkeypatch, capsys):
    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["study", "--data", str(tmp_path), "--workers", "1", *arguments])
        study.main("", ARMS, lambda *_folders: toy_run, str(tmp_path))

    main("--arms", "last*")
    assert {file.name for file in (tmp_path / "runs").iterdir()} == {f"last-layer-at-once-{n}.json" for n in range(3)}
    with pytest.raises(SystemExit):
        main("--arms", "lost")
    assert "'lost' matches none of: SoftMax, last layer, at once" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "name"), [(adapt_vit, "mnist"), (adapt_minilm, "imdb")])
def test_missing_data_ends_in_a_sentence(module, name, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["study", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=name):
        study.main(module.__doc__, ARMS, module.prepare, "unused")


@pytest.mark.parametrize("arm", adapt_vit.ARMS)
def test_every_arm_ends_at_its_settings(arm):
    settings, schedule = adapt_vit.ARMS[arm]
    model = sinkformers.to_sinkformer(adapt_vit.ViT(), **settings)
    for step in range(8):
        schedule(model, step, 8)
    layer = model.encoder.layers[adapt_vit.DEPTH - 1].self_attn
    ends = {"SoftMax": (1, 1.0), "tau learned": (3, "learned"), "tau 0.5": (3, 0.5)}
    assert (layer.sinkhorn.n_iters, layer.sinkhorn.tau) == ends.get(arm, (3, 1.0))
    assert model(torch.randn(2, 16, 49)).shape == (2, 10)


def test_the_arm_at_the_limit_is_a_conversion_at_the_limit():
    model = sinkformers.to_sinkformer(adapt_vit.ViT(), **adapt_minilm.ARMS["at the limit"].settings)
    assert {layer.self_attn.sinkhorn.n_iters for layer in model.encoder.layers} == {math.inf}
    with sinkformers.watch_attention(model) as watch:
        model(torch.randn(2, 16, 49, generator=torch.Generator().manual_seed(0)))
    errors = [float(call.column_error.max()) for layer in watch.values() for call in layer.calls]
    assert len(errors) == adapt_vit.DEPTH
    assert max(errors) < 1e-2
