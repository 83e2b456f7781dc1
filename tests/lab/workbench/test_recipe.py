"""Rates that change with every step, and runs that continue from the model of another."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from toy import ToyTask

from sinkformers.lab.artefacts import selection
from sinkformers.lab.artefacts.artefact import Arm, Artefact, ExperimentError, Preset, Run
from sinkformers.lab.workbench import checkpoint, runner
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.locks import locked
from sinkformers.lab.workbench.runner import train_missing
from sinkformers.lab.workbench.task import WarmRecipe
from sinkformers.lab.workbench.training import Hooks, Training

WARM = WarmRecipe(epochs=3, batch=10, rate=0.02, warmup=6, betas=(0.8, 0.9), decay=0.3)
PRESET = Preset(
    about="",
    takes="",
    data="",
    seeds=(0, 1),
    arms=(Arm("first-n-1", {"n_iters": 1}), Arm("then-n-3", {"n_iters": 3}, "first-n-1")),
    config=None,
)


class WarmTask(ToyTask):
    def __init__(self, **changes):
        super().__init__(dropout=0.0, **changes)
        self.recipe = WARM


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_rate_rises_then_falls_with_the_inverse_root():
    recipe = WarmRecipe(epochs=1, batch=1, rate=5e-4, warmup=4000)
    rates = [recipe.rate_at(1, step) for step in (1, 2000, 4000, 16_000)]
    assert rates == pytest.approx([1.25e-7, 2.5e-4, 5e-4, 2.5e-4])
    assert WarmRecipe(epochs=1, batch=1, rate=5e-5, warmup=4000, begun=12_000).rate_at(1, 4000) == pytest.approx(2.5e-5)


class Stop(Exception):
    pass


def train(folder, stop_after=None):
    taken = []

    def step(*which):
        taken.append(which)
        if stop_after is not None and len(taken) > stop_after:  # before this step is saved
            raise Stop

    hooks = Hooks(step, lambda *_: None)
    task = WarmTask()
    return Training(task, {"seed": 0, **task.facts}, folder, Accelerator(cpu=True), hooks).run(0.0)


def test_every_step_has_its_rate_even_after_a_stop(tmp_path):
    """By hand: AdamW with the rate set before each step. 37 examples make 4 steps per epoch."""
    torch.manual_seed(0)
    task = WarmTask()
    model = task.model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.8, 0.9), weight_decay=0.3, fused=True)
    step = 0
    for epoch in (1, 2, 3):
        for batch in task.batches(epoch):
            step += 1
            optimiser.param_groups[0]["lr"] = 0.02 * min(step / 6, (6 / step) ** 0.5)
            (task.losses(model, batch)[0] / len(batch)).backward()
            optimiser.step()
            optimiser.zero_grad()
    with pytest.raises(Stop):
        train(tmp_path, stop_after=6)
    done = train(tmp_path)
    for p, q in zip(done.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    rates = [0.02 * min(step / 6, (6 / step) ** 0.5) for step in (1, 4, 8, 12)]
    assert [record["rate"] for record in done.epochs] == pytest.approx(rates, rel=1e-6)


@pytest.fixture
def artefact():
    def task(_preset, arm, seed, _data):
        made = ToyTask(seed, n_iters=arm.n_iters, epochs=2)
        made.files = lambda: {"note.txt": arm.name.encode()}
        return made

    return Artefact(name="toy", title="A toy", paper="nothing", metric="loss", presets={"smoke": PRESET}, task=task)


def train_runs(artefact, out, **picked):
    runs = selection.select_runs(artefact, "smoke", **picked)
    return train_missing(
        artefact, "smoke", runs, data=None, out=out, display=Display(quiet=True), device="cpu", save_every=60.0
    )


def record(out, arm, seed=0):
    return json.loads((out / "toy" / "smoke" / arm / f"seed-{seed}" / "metrics.json").read_text())["epochs"]


def test_a_run_continues_from_the_trained_model_of_the_same_seed(artefact, tmp_path):
    assert train_runs(artefact, tmp_path) == []
    for seed in (0, 1):
        first, then = (tmp_path / "toy" / "smoke" / arm / f"seed-{seed}" for arm in ("first-n-1", "then-n-3"))
        weights, _ = checkpoint.read(first / "model.safetensors")
        task = ToyTask(seed, n_iters=3)
        model = task.model()
        model.load_state_dict(weights)
        # Before training it is the model of the other run with another normalisation.
        at_first = record(tmp_path, "then-n-3", seed)[0]["test"]["loss"]
        assert at_first == pytest.approx(task.evaluate(model.eval(), None)["loss"], rel=1e-6)
        assert at_first != record(tmp_path, "first-n-1", seed)[-1]["test"]["loss"]
        assert (then / "note.txt").read_text() == "then-n-3"


def test_a_run_whose_start_is_missing_is_refused(artefact, tmp_path):
    with pytest.raises(
        ExperimentError, match=r"then-n-3, seed 0 continues with the model of first-n-1, and .* not fin"
    ):
        train_runs(artefact, tmp_path, arms=["then-*"])
    train_runs(artefact, tmp_path, arms=["first-*"], seeds="0")
    train_runs(artefact, tmp_path, arms=["then-*"], seeds="0")
    assert len(record(tmp_path, "then-n-3")) == 3


def test_a_run_waits_while_another_process_trains_its_start(artefact, tmp_path):
    with locked(tmp_path / "toy/smoke/first-n-1/seed-0"):
        left = train_runs(artefact, tmp_path, seeds="0")
    assert [run.arm.name for run in left] == ["first-n-1", "then-n-3"]
    assert not (tmp_path / "toy/smoke/then-n-3").exists()


def test_other_n_iters_do_not_change_the_start(artefact):
    runs = selection.select_runs(artefact, "smoke", n_iters="3,5", seeds="4")
    assert [run.arm.name for run in runs] == ["first-n-1", "then-n-3", "then-n-5"]
    assert runs[2].before == Path("toy/smoke/first-n-1/seed-4")
    assert Run("a", "b", Arm("c", {}), 0).before is None


def test_a_run_that_another_process_finishes_before_it_is_locked_is_not_trained(artefact, tmp_path, monkeypatch):
    """The other process finishes between the check and the lock."""
    folder = tmp_path / "toy/smoke/first-n-1/seed-0"

    @contextmanager
    def finishing(folder):
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text("{}")
        yield True

    monkeypatch.setattr(runner, "locked", finishing)
    assert train_runs(artefact, tmp_path, arms=["first-*"], seeds="0") == []
    assert (folder / "metrics.json").read_text() == "{}"
