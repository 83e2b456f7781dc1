"""`sinkformers run --cluster` and `--dry-run`: what is printed, what is refused, and a run that was preempted."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from sinkformers.lab.artefacts.artefact import JOB_LOG, METRICS_FILE, MODEL_FILE
from sinkformers.lab.cli import refusal
from sinkformers.lab.cli.app import app
from tests.lab.fake_runs import write_run, write_unfinished

SMOKE = ["run", "figure5", "--preset", "smoke"]
RUN_FOLDER = Path("figure5", "smoke", "n-3", "seed-0")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "1"], "--gpus describes jobs; add --cluster slurm or --cluster local."),
        (["--wait"], "--wait describes jobs; add --cluster slurm or --cluster local."),
        (["--cluster", "local", "--partition", "p"], "--partition is for --cluster slurm; --cluster local has no"),
        (["--cluster", "local", "--time", "4h"], "--time must be minutes, hours:minutes:seconds or days-hours, such"),
        (["--cluster", "slurm"], "--cluster slurm: there is no sbatch on PATH. Run the command on a machine of a"),
        (["--cluster", "slurm", "--device", "cuda"], "--device cuda: the jobs have no GPU. Add --gpus 1."),
        (["--cluster", "slurm", "--gpus", "2", "--processes", "3"], "--gpus 2 trains a run with one process per GPU;"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke(*SMOKE, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"sinkformers: {sentence}")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_jobs_are_refused_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    result = invoke(*SMOKE, "--out", tmp_path, "--cluster", "local")
    assert result.exit_code == 2
    assert "--cluster cannot be used with torchrun, which each job starts itself" in result.stderr


def test_what_trains_nothing_has_no_jobs(tmp_path):
    result = invoke("run", "figure1", "--preset", "paper", "--out", tmp_path, "--cluster", "local")
    assert result.exit_code == 2
    assert "figure1 trains nothing, so that there are no jobs; leave --cluster out." in result.stderr


def test_without_submitit_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(refusal, "find_spec", lambda name: None if name == "submitit" else name)
    result = invoke(*SMOKE, "--out", tmp_path, "--cluster", "local")
    assert result.exit_code == 2
    assert result.stderr == (
        "sinkformers: jobs of a cluster need submitit; install it with pip install '.[cluster]' in your clone.\n"
    )


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(tmp_path):
    write_run(tmp_path, artefact="figure5", preset="smoke", n_iters=1)
    write_unfinished(tmp_path, artefact="figure5", preset="smoke", arm="n-3", seed=0, epochs=1)
    before = sorted(tmp_path.rglob("*"))
    result = invoke(*SMOKE, "--out", tmp_path, "--seeds", "0-1", "--dry-run")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "n-1, seed 0: finished",
        "n-3, seed 0: to be trained (1 epoch is logged)",
        "n-1, seed 1: to be trained",
        "n-3, seed 1: to be trained",
        "3 runs would be trained.",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_jobs_needs_no_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke(
        *("run", "table2", "--preset", "smoke", "--out", tmp_path / "out", "--n-iters", "3", "--dry-run"),
        *("--cluster", "slurm", "--partition", "p", "--gpus", "2", "--time", "1:30:00"),
    )
    assert result.exit_code == 0, result.output
    assert "continued-n-3, seed 0: to be trained, after pretrain-n-1" in result.output
    assert re.search(
        r"^\d runs would be submitted, each as a job: 2 processes, 2 CPUs, 2 GPUs, 1 h 30 min at a time, partition p.$",
        result.output,
        re.MULTILINE,
    )
    command = result.output.partition("The command of the first job: ")[2]
    assert "--nproc-per-node=2 -m sinkformers.lab.cli run table2" in command
    assert "--n-iters 3" in command
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_drawing_writes_nothing(tmp_path):
    result = invoke("run", "figure1", "--preset", "paper", "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert result.output.startswith("Nothing is trained: the result would be written to ")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "figure5").write_text("in the way")
    result = invoke(*SMOKE, "--out", tmp_path, "--cluster", "local")
    assert result.exit_code == 2
    assert "Choose another --out, one that can be written" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_run_that_fails_is_named_with_its_last_words(tmp_path):
    folder = tmp_path / RUN_FOLDER
    folder.mkdir(parents=True)
    (folder / "checkpoint.safetensors").write_bytes(b"damaged")
    command = [sys.executable, "-m", "sinkformers.lab.cli", *SMOKE, "--arms", "n-3", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--cluster", "local"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert re.match(r"n-3, seed 0: sinkformers: .*checkpoint\.safetensors is damaged.* \(log: .*job\.log\)$", first)
    assert last.startswith("sinkformers: 1 of 1 runs are not finished, and their jobs have ended. The same command")


def test_a_preempted_run_ends_with_the_bytes_of_an_undisturbed_one(tmp_path):
    command = [sys.executable, "-m", "sinkformers.lab.cli", *SMOKE, "--arms", "n-3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", str(tmp_path / "whole")], env=environment, check=True, timeout=300)
    out = tmp_path / "in 'jobs\""
    process = subprocess.Popen(
        [*command, "--out", str(out), "--cluster", "local"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (out / RUN_FOLDER / "log.jsonl").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (job,) = (each for each in psutil.Process(process.pid).children(recursive=True) if is_job(each))
    job.send_signal(signal.SIGUSR2)
    said, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint
    assert "n-3, seed 0: done" in said
    assert "Written to" in said  # the report
    assert ": continues after epoch " in (out / RUN_FOLDER / JOB_LOG).read_text()
    for name in (METRICS_FILE, MODEL_FILE):
        assert (out / RUN_FOLDER / name).read_bytes() == (tmp_path / "whole" / RUN_FOLDER / name).read_bytes()
    left = {file.name for file in (out / RUN_FOLDER).iterdir()}
    assert left == {"job.log", "log.jsonl", "metrics.json", "model.safetensors", "run.json", "tensorboard"}


def is_job(process):
    return "submitit.core._submit" in process.cmdline()
