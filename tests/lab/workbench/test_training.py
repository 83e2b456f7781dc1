"""The training loop equals a plain loop, and may be stopped at any step without changing the result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from toy import ToyTask

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.workbench import checkpoint
from sinkformers.lab.workbench.training import CHECKPOINT, Hooks, Training


class Stop(Exception):
    pass


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(task, folder, *, seed=0, stop_after=None, save_every=0.0, precision="no"):
    taken = []

    def step(epoch, number, of):
        taken.append((epoch, number))
        assert number <= of
        if stop_after is not None and len(taken) > stop_after:  # before this step is saved
            raise Stop

    folder.mkdir(exist_ok=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    identity = {"seed": seed, **task.facts}
    training = Training(task, identity, folder, accelerator, Hooks(step, lambda _record, _seconds: None))
    return training.run(save_every)


def test_it_is_plain_adam_on_the_mean_loss(tmp_path):
    task = ToyTask(dropout=0.0)
    done = train(task, tmp_path)

    set_seed(0)
    model = task.model()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    expected = [F.cross_entropy(model(task.x), task.y).item()]
    losses = []
    for epoch in (1, 2, 3):
        optimiser.param_groups[0]["lr"] = 0.01 if epoch <= 2 else 0.001
        total = 0.0
        for batch in task.batches(epoch):
            loss = F.cross_entropy(model(task.x[batch]), task.y[batch])
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            total += loss.item() * len(batch)
        losses.append(total / len(task.x))
        expected.append(F.cross_entropy(model(task.x), task.y).item())
    assert [record["test"]["loss"] for record in done.epochs] == pytest.approx(expected, rel=1e-5)
    assert [record["train"]["loss"] for record in done.epochs[1:]] == pytest.approx(losses, rel=1e-5)
    assert [record["rate"] for record in done.epochs] == [0.01, 0.01, 0.01, 0.001]
    assert done.epochs[0]["train"] == {}
    assert len(done.seconds) == 3


@pytest.mark.parametrize("size", [37, 31])  # with 31 there is a batch of one example
def test_a_batch_in_parts_is_the_same_batch(tmp_path, size):
    whole, parts = (ToyTask(dropout=0.0, accumulate=n, size=size, dtype=torch.float64) for n in (1, 3))
    first, second = train(whole, tmp_path / "1"), train(parts, tmp_path / "2")
    for ours, theirs in zip(first.epochs, second.epochs, strict=True):
        assert ours["train"] == pytest.approx(theirs["train"], rel=1e-6)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("stop_after", [0, 1, 3, 4, 5, 10])
def test_a_training_stopped_at_any_step_resumes_to_the_same_bits(tmp_path, stop_after):
    task = ToyTask()
    folder = tmp_path / "stopped"
    folder.mkdir()
    whole = train(task, tmp_path, save_every=1e9)
    with pytest.raises(Stop):
        train(task, folder, stop_after=stop_after)
    torch.manual_seed(99)
    resumed = train(task, folder)
    assert resumed.resumed == min(stop_after, 1)
    assert resumed.epochs == whole.epochs
    for p, q in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_seeds_seed_and_differ(tmp_path):
    first, again, other = (train(ToyTask(seed), tmp_path, seed=seed, save_every=1e9).epochs for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_half_precision_resumes_too(tmp_path):
    task = ToyTask()
    whole = train(task, tmp_path / "none", precision="bf16", save_every=1e9)
    with pytest.raises(Stop):
        train(task, tmp_path, stop_after=6, precision="bf16")
    assert train(task, tmp_path, precision="bf16").epochs == whole.epochs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.5}, r"was written under another config: .*'rate': 0.01.*, now .*'rate': 0.5"),
        ({"n_iters": 5}, r"was written under another config"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused(tmp_path, change, message):
    with pytest.raises(Stop):
        train(ToyTask(), tmp_path, stop_after=2)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ExperimentError, match=message):
        train(ToyTask(**change), tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    with pytest.raises(Stop):
        train(ToyTask(), tmp_path, stop_after=2)
    tensors, state = checkpoint.read(tmp_path / CHECKPOINT)
    tensors["model.head.weight"] = torch.zeros(9, 6)
    checkpoint.write(tmp_path / CHECKPOINT, tensors, state)
    with pytest.raises(
        ExperimentError, match=r"belongs to another model: head.weight is \(9, 6\) there and \(2, 6\) here"
    ):
        train(ToyTask(), tmp_path)


DISTRIBUTED = """
import json, sys, torch
from pathlib import Path
from accelerate import Accelerator
from toy import ToyTask
from sinkformers.lab.workbench.training import Hooks, Training

accelerator = Accelerator(cpu=True)
task = ToyTask(dropout=0.0, dtype=torch.float64, accumulate=int(sys.argv[2]))
hooks = Hooks(lambda *_: None, lambda *_: None)
try:
    done = Training(task, {"seed": 0, **task.facts}, Path(sys.argv[1]), accelerator, hooks).run(0.0)
    if accelerator.is_main_process:
        values = torch.cat([p.detach().flatten() for p in done.model.parameters()]).tolist()
        Path(sys.argv[1], "out.json").write_text(json.dumps({"values": values, "epochs": done.epochs}))
finally:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def test_two_processes_give_the_result_of_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DISTRIBUTED)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    for folder, start in (("one", []), ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"])):
        (tmp_path / folder).mkdir()
        command = [sys.executable, *start, str(script), str(tmp_path / folder), "2"]
        subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True)
    one, two = (json.loads((tmp_path / folder / "out.json").read_text()) for folder in ("one", "two"))
    assert two["values"] == pytest.approx(one["values"], abs=1e-12)
    for ours, theirs in zip(one["epochs"], two["epochs"], strict=True):
        assert theirs["train"] == pytest.approx(ours["train"], rel=1e-6)
    with pytest.raises(ExperimentError, match="was written by 2 processes, and this run has 1"):
        train(ToyTask(dropout=0.0, dtype=torch.float64, accumulate=2), tmp_path / "two")
