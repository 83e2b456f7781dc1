"""Runs at the limit, n_iters = ∞: records, resuming, identical runs."""

import json
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from toy import ToyTask

from sinkformers.lab.artefacts import selection
from sinkformers.lab.artefacts.artefact import Arm, Artefact, ExperimentError, Preset
from sinkformers.lab.workbench import checkpoint
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.runner import train_missing
from sinkformers.lab.workbench.training import CHECKPOINT, Hooks, Training


class Stop(Exception):
    pass


def artefact(name, arms, identical_runs_in=()):
    return Artefact(
        name=name,
        title=name,
        paper="nothing",
        metric="loss",
        presets={"smoke": Preset(about="about", takes="a second", seeds=(0,), arms=arms)},
        task=lambda _preset, arm, seed, _data: ToyTask(seed, n_iters=arm.n_iters, epochs=2),
        identical_runs_in=identical_runs_in,
    )


FIRST = artefact("first", (Arm("a-n-3", {"n_iters": 3}), Arm("a-n-inf", {"rate": 0.01, "n_iters": math.inf})))
SECOND = artefact("second", (Arm("n-inf", {"n_iters": math.inf}),), identical_runs_in=("first",))


def train(chosen, out):
    runs = selection.select_runs(chosen, "smoke")
    train_missing(chosen, "smoke", runs, data=None, out=out, display=Display(quiet=True), device="cpu", save_every=60.0)


def train_task(task, folder, *, stop_after=math.inf, save_every=0.0):
    steps = []

    def step(*position):
        steps.append(position)
        if len(steps) > stop_after:  # before this step is saved
            raise Stop

    folder.mkdir(exist_ok=True)
    hooks = Hooks(step, lambda _record, _seconds: None)
    return Training(task, {"seed": 0, **task.facts}, folder, Accelerator(cpu=True), hooks).run(save_every)


def read(folder, name):
    return (folder / name).read_bytes()


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_the_files_of_a_run_at_the_limit_are_valid_json(tmp_path):
    train(FIRST, tmp_path)
    folder = tmp_path / "first/smoke/a-n-inf/seed-0"
    metrics = json.loads(read(folder, "metrics.json"), parse_constant=no_constant)
    assert metrics["settings"] == {"n_iters": "inf", "rate": 0.01}
    assert metrics["config"]["n_iters"] == "inf"
    assert metrics["epochs"][-1]["layers"][0]["column_error"] < 1e-2  # at the limit, up to its tolerance
    for line in read(folder, "log.jsonl").splitlines():
        json.loads(line, parse_constant=no_constant)
    json.loads(read(folder, "run.json"), parse_constant=no_constant)
    assert checkpoint.read(folder / "model.safetensors")[1]["settings"]["n_iters"] == math.inf


@pytest.mark.parametrize("stop_after", [1, 5])
def test_a_training_at_the_limit_resumes_to_the_same_bits(tmp_path, stop_after):
    task = ToyTask(n_iters=math.inf)
    whole = train_task(task, tmp_path / "whole", save_every=1e9)
    with pytest.raises(Stop):
        train_task(task, tmp_path / "stopped", stop_after=stop_after)
    assert b"Infinity" not in (tmp_path / "stopped" / CHECKPOINT).read_bytes()
    resumed = train_task(task, tmp_path / "stopped")
    assert resumed.resumed == 1
    assert resumed.epochs == whole.epochs
    for p, q in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("before", "now"), [(3, math.inf), (math.inf, 3)])
def test_a_checkpoint_of_other_iterations_is_refused(tmp_path, before, now):
    with pytest.raises(Stop):
        train_task(ToyTask(n_iters=before), tmp_path, stop_after=1)
    with pytest.raises(ExperimentError, match=rf"under another config: .*'n_iters': {before}.* now .*'n_iters': {now}"):
        train_task(ToyTask(n_iters=now), tmp_path)


def test_identical_runs_at_the_limit_are_found_and_copied(tmp_path):
    train(FIRST, tmp_path / "shared")
    train(SECOND, tmp_path / "shared")
    train(SECOND, tmp_path / "alone")
    copied, trained = (tmp_path / out / "second/smoke/n-inf/seed-0" for out in ("shared", "alone"))
    assert json.loads(read(copied, "run.json"))["same_as"] == "first/smoke/a-n-inf/seed-0"
    assert read(copied, "metrics.json") == read(trained, "metrics.json")
