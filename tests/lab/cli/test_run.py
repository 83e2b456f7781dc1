"""`sinkformers run` and `list`: killed, in parallel, distributed, and with wrong arguments."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from sinkformers.lab.cli.app import app
from sinkformers.lab.workbench.locks import locked

COMMAND = [sys.executable, "-m", "sinkformers.lab.cli", "run", "figure5", "--preset", "smoke"]
RUN_FOLDER = Path("figure5", "smoke", "n-3", "seed-0")


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def start(*arguments, command=COMMAND, **environment):
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder and the output of both runs of the smoke preset, trained without interruption."""
    out = tmp_path_factory.mktemp("finished")
    process = start("--out", out)
    said, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint
    return out, said


def test_a_run_leaves_records_and_a_report(finished):
    out, said = finished
    metrics = json.loads((out / RUN_FOLDER / "metrics.json").read_text())
    assert [epoch["epoch"] for epoch in metrics["epochs"]] == [0, 1, 2]
    assert metrics["settings"] == {"n_iters": 3}
    assert metrics["config"]["n_iters"] == 3
    assert metrics["data"] == {"name": "digits", "train": 1438, "test": 359}
    assert len(metrics["epochs"][0]["layers"]) == 2
    assert metrics["epochs"][0]["layers"][0]["row_error"] < 1e-5
    assert "n-3, seed 0: epoch 2/2, train loss" in said
    page = re.search(r"Written to (.*)$", said, re.MULTILINE)[1]
    assert Path(page).read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    # What is left: the record, what made it, the weights, the log, and images to predict. No lock, no checkpoint.
    assert {file.name for file in (out / RUN_FOLDER).iterdir()} == {
        "log.jsonl",
        "metrics.json",
        "model.safetensors",
        "run.json",
        "tensorboard",
        "classes.json",
        "pixels.json",
        *(f"example-{digit}.png" for digit in range(10)),
    }
    assert len((out / RUN_FOLDER / "log.jsonl").read_text().splitlines()) == 3


def test_a_run_at_the_limit_leaves_valid_json_and_a_report(tmp_path):
    def refused(name):
        raise AssertionError(f"{name} is no JSON")

    result = invoke("run", "figure5", "--preset", "smoke", "--n-iters", "1,inf", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    folder = tmp_path / RUN_FOLDER.parents[1] / "n-inf" / "seed-0"
    metrics = json.loads((folder / "metrics.json").read_text(), parse_constant=refused)
    assert (metrics["settings"], metrics["config"]["n_iters"]) == ({"n_iters": "inf"}, "inf")
    assert max(layer["column_error"] for layer in metrics["epochs"][-1]["layers"]) < 1e-2
    assert "Sinkhorn, n_iters = ∞" in result.output
    again = invoke("run", "figure5", "--preset", "smoke", "--n-iters", "inf", "--out", tmp_path)
    assert again.exit_code == 0
    assert "epoch" not in again.output.partition("Cats and dogs")[0]  # it is finished


def test_the_record_contains_neither_times_nor_paths(finished):
    text = (finished[0] / RUN_FOLDER / "metrics.json").read_text()
    assert str(finished[0]) not in text
    assert "second" not in text
    assert {"seconds_per_epoch", "versions", "commit", "machine"} <= json.loads(
        (finished[0] / RUN_FOLDER / "run.json").read_text()
    ).keys()


def test_a_killed_run_continues_to_the_same_bytes(finished, tmp_path):
    arguments = ("--out", tmp_path, "--arms", "n-3", "--save-every", "0")
    process = start(*arguments)
    log, deadline = tmp_path / RUN_FOLDER / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and len(log.read_text().splitlines()) == 2):  # the second epoch has begun
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / RUN_FOLDER / "metrics.json").exists()
    assert (tmp_path / RUN_FOLDER / "checkpoint.safetensors").exists()
    again = start(*arguments)
    said, complaint = again.communicate(timeout=300)
    assert again.returncode == 0, complaint
    assert re.search(r"^n-3, seed 0: continues after epoch \d, step \d+\.$", said, re.MULTILINE)
    assert (tmp_path / RUN_FOLDER / "metrics.json").read_bytes() == (
        finished[0] / RUN_FOLDER / "metrics.json"
    ).read_bytes()
    assert (tmp_path / RUN_FOLDER / "model.safetensors").read_bytes() == (
        finished[0] / RUN_FOLDER / "model.safetensors"
    ).read_bytes()
    assert json.loads((tmp_path / RUN_FOLDER / "run.json").read_text())["resumed"] == 1


def test_an_interrupt_while_data_is_read_exits_with_130(tmp_path, monkeypatch):
    def read_on(_folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("sinkformers.lab.data.load_imdb", read_on)
    result = invoke("run", "figure4", "--data", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert result.stderr == ("sinkformers: stopped. What is finished is kept, and the same command does the rest.\n")
    assert "n-1, seed 0: reading imdb." in result.stdout


def test_two_commands_in_one_folder_train_each_run_once(finished, tmp_path):
    both = [start("--out", tmp_path, "--seeds", "0-2") for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    trained = [set(re.findall(r"^(n-\d, seed \d): epoch 2/2", text, re.MULTILINE)) for text in said]
    assert not trained[0] & trained[1]
    assert len(trained[0] | trained[1]) == 6
    assert (tmp_path / RUN_FOLDER / "metrics.json").read_bytes() == (
        finished[0] / RUN_FOLDER / "metrics.json"
    ).read_bytes()


def test_an_error_of_all_jobs_is_printed_once(tmp_path):
    (tmp_path / "data").mkdir()
    process = start("--out", tmp_path / "out", "--jobs", "2", "--data", tmp_path / "data", "--preset", "small")
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 2
    assert complaint.count("sinkformers: ") == complaint.count("\n") == 1
    assert "dogs-vs-cats: there is neither" in complaint


def test_jobs_train_in_separate_processes(finished, tmp_path):
    process = start("--out", tmp_path, "--jobs", "2")
    said, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint
    assert {"n-1, seed 0: done", "n-3, seed 0: done"} <= set(said.splitlines())
    assert (tmp_path / RUN_FOLDER / "metrics.json").read_bytes() == (
        finished[0] / RUN_FOLDER / "metrics.json"
    ).read_bytes()


def test_two_processes_of_torchrun_train_one_run_together(finished, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    process = start("--out", tmp_path, "--arms", "n-3", command=[*launcher, *COMMAND[2:]])
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint
    one, two = (json.loads((out / RUN_FOLDER / "metrics.json").read_text()) for out in (finished[0], tmp_path))
    assert json.loads((tmp_path / RUN_FOLDER / "run.json").read_text())["processes"] == 2
    for ours, theirs in zip(one["epochs"], two["epochs"], strict=True):
        assert theirs["test"]["loss"] == pytest.approx(ours["test"]["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "figure7"], "there is no artefact 'figure7'. Choose one of figure1,"),
        (["run", "figure6", "--preset", "huge"], "figure6 has no preset 'huge'. Choose one of paper, authors,"),
        (["run", "figure6", "--preset", "smoke", "--seeds", "x"], "--seeds must be whole numbers from 0 to"),
        (["run", "figure6", "--preset", "smoke", "--seeds", "0-999999999"], "--seeds names 1,000,000,000 numbers, and"),
        (["run", "figure6", "--preset", "smoke", "--n-iters", "0"], "--n-iters must be whole numbers from 1 to"),
        (["run", "figure6", "--preset", "smoke", "--arms", "y"], "--arms y holds none of the arms of smoke: patch-8"),
        (["run", "figure6", "--data", "OUT/absent", "--out", "OUT"], "absent"),
        (["run", "figure6", "--data", "OUT", "--out", "OUT"], "train-images-idx3-ubyte"),
        (["run", "figure6", "--preset", "smoke", "--out", "OUT/file"], "Choose another --out, one that can be written"),
        (["run", "figure1", "--preset", "paper", "--out", "OUT/file"], "Choose another --out, one that can be written"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(tmp_path, arguments, sentence):
    (tmp_path / "file").write_text("in the way")
    result = invoke(*(argument.replace("OUT", str(tmp_path)) for argument in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith("sinkformers: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path):
    (tmp_path / RUN_FOLDER).mkdir(parents=True)
    (tmp_path / RUN_FOLDER / "checkpoint.safetensors").write_bytes(b"damaged")
    result = invoke("run", "figure5", "--preset", "smoke", "--arms", "n-3", "--out", tmp_path)
    assert result.exit_code == 2
    assert "is damaged" in result.stderr
    assert (tmp_path / RUN_FOLDER / "checkpoint.safetensors").read_bytes() == b"damaged"
    with locked(tmp_path / RUN_FOLDER) as held:
        assert held


def test_figure1_is_drawn(tmp_path):
    result = invoke("run", "figure1", "--preset", "paper", "--out", tmp_path)
    assert result.exit_code == 0
    assert "K^∞ Sinkhorn" in result.output
    assert {file.name for file in (tmp_path / "figure1" / "paper").iterdir()} == {"figure1.png", "figure1.svg"}


def test_the_lines_of_the_list_begin_with_the_names():
    names = {line.split()[0] for line in invoke("list").output.splitlines() if not line.startswith(" ")}
    listed = json.loads(invoke("list", "--json").output)
    assert names == {artefact["name"] for artefact in listed}
    assert "figure2-translation" in names
    assert next(a for a in listed if a["name"] == "figure6")["presets"]["small"]["seeds"] == [0, 1, 2]
