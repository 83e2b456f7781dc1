"""Identical runs are copied between artefacts, byte for byte what training again would give."""

import json

import pytest
import torch
from toy import ToyTask

from sinkformers.lab.artefacts import selection
from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.artefacts.catalogue import ARTEFACTS, find
from sinkformers.lab.workbench import checkpoint
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.identical_runs import copy_run, find_identical
from sinkformers.lab.workbench.locks import LOCK_FILE
from sinkformers.lab.workbench.runner import train_missing


def task(_preset, arm, seed, _data):
    made = ToyTask(seed, n_iters=arm.n_iters, rate=arm.settings.get("rate", 0.01), epochs=2)
    made.files = lambda: {"note.txt": b"kept"}
    return made


def artefact(name, arms, identical_runs_in=()):
    preset = Preset(about="about", takes="a second", data="", seeds=(0, 1), arms=arms, config=None)
    return Artefact(
        name=name,
        title=name,
        paper="nothing",
        metric="loss",
        presets={"smoke": preset},
        task=task,
        identical_runs_in=identical_runs_in,
    )


FIRST = artefact("first", (Arm("a-n-3", {"rate": 0.01, "n_iters": 3}), Arm("b-n-3", {"rate": 0.5, "n_iters": 3})))
SECOND = artefact("second", (Arm("n-3", {"n_iters": 3}), Arm("n-1", {"n_iters": 1})), identical_runs_in=("first",))


def train(chosen, out, seeds="0"):
    runs = selection.select_runs(chosen, "smoke", seeds=seeds)
    return train_missing(
        chosen, "smoke", runs, data=None, out=out, display=Display(quiet=True), device="cpu", save_every=60.0
    )


def read(folder, name):
    return (folder / name).read_bytes()


def test_an_identical_run_is_copied_and_equals_a_training_byte_for_byte(tmp_path):
    train(FIRST, tmp_path / "shared")
    train(SECOND, tmp_path / "shared")
    train(SECOND, tmp_path / "alone")
    taken, trained = (tmp_path / out / "second/smoke/n-3/seed-0" for out in ("shared", "alone"))
    for name in ("metrics.json", "note.txt"):
        assert read(taken, name) == read(trained, name), name
    weights = [checkpoint.read(folder / "model.safetensors")[0] for folder in (taken, trained)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    made = json.loads(read(taken, "run.json"))
    assert made["same_as"] == "first/smoke/a-n-3/seed-0"
    assert made["finished"] == json.loads(read(tmp_path / "shared" / made["same_as"], "run.json"))["finished"]
    assert "same_as" not in json.loads(read(trained, "run.json"))
    assert "same_as" not in json.loads(read(tmp_path / "shared/second/smoke/n-1/seed-0", "run.json"))


def test_the_lock_of_an_identical_run_is_not_copied(tmp_path):
    """It would replace the lock that this process holds."""
    train(FIRST, tmp_path)
    identical, folder = tmp_path / "first/smoke/a-n-3/seed-0", tmp_path / "copy"
    (identical / LOCK_FILE).touch()  # held by a process that is about to release it
    folder.mkdir()
    copy_run(selection.select_runs(SECOND, "smoke")[0], folder, identical, tmp_path)
    assert {file.name for file in folder.iterdir()} == {"metrics.json", "model.safetensors", "note.txt", "run.json"}


@pytest.mark.parametrize("change", ["seed", "unfinished", "damaged"])
def test_runs_that_are_not_identical_are_trained(change, tmp_path):
    train(FIRST, tmp_path, seeds="1" if change == "seed" else "0")
    if change == "unfinished":
        (tmp_path / "first/smoke/a-n-3/seed-0/metrics.json").unlink()
    if change == "damaged":
        (tmp_path / "first/smoke/a-n-3/seed-0/metrics.json").write_text("{")
    train(SECOND, tmp_path)
    assert "same_as" not in json.loads(read(tmp_path / "second/smoke/n-3/seed-0", "run.json"))


def test_identical_runs_agree_in_their_environment(tmp_path):
    train(FIRST, tmp_path)
    identity = {"seed": 0, "settings": {}, "config": {"n_iters": 3, "rate": 0.01}}
    identical = tmp_path / "first/smoke/a-n-3/seed-0"
    assert find_identical(tmp_path, ("first",), identity, {"precision": "no", "processes": 1}) == identical
    assert find_identical(tmp_path, ("first",), identity, {"precision": "bf16", "processes": 1}) is None
    assert find_identical(tmp_path, ("first",), {**identity, "data": "more"}, {}) is None
    assert find_identical(tmp_path, ("other",), identity, {}) is None


@pytest.mark.parametrize("chosen", [each for each in ARTEFACTS if each.identical_runs_in], ids=lambda each: each.name)
def test_artefacts_that_declare_shared_runs_have_some(chosen):
    """Some arm of each small preset has the same configuration as an arm of the other artefact."""
    own = [chosen.presets["small"].config.with_settings(arm.settings) for arm in chosen.presets["small"].arms]
    others = [
        preset.config.with_settings(arm.settings)
        for identical in chosen.identical_runs_in
        for preset in find(identical).presets.values()
        for arm in preset.arms
    ]
    assert any(config in others for config in own)
