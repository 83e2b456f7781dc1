"""`sinkformers run` when it is stopped: its message is true, and it leaves no process behind."""

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

from sinkformers.lab.artefacts.artefact import METRICS_FILE, Arm, Run
from sinkformers.lab.cli.app import app
from sinkformers.lab.workbench.display import Display
from sinkformers.lab.workbench.locks import locked
from sinkformers.lab.workbench.workers import side_by_side
from tests.lab.fake_runs import write_run

COMMAND = [sys.executable, "-m", "sinkformers.lab.cli", "run", "figure5", "--preset", "smoke"]
RUN_FOLDERS = [Path("figure5", "smoke", arm, "seed-0") for arm in ("n-1", "n-3")]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


@pytest.fixture
def start():
    """Start the command, and end it with the test."""
    started = []

    def begin(*arguments, command=COMMAND):
        process = subprocess.Popen(
            [*command, *map(str, arguments)], env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the condition was not reached: {process.communicate()}")
        time.sleep(0.002)


def finish(*arguments):
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the records of both runs, trained without interruption."""
    out = tmp_path_factory.mktemp("whole")
    finish("--out", out)
    return [(out / run / METRICS_FILE).read_bytes() for run in RUN_FOLDERS]


@SIGNALS
def test_a_stopped_run_continues_at_the_same_step(whole, start, tmp_path, number, code):
    process = start("--out", tmp_path, "--arms", "n-3")
    wait_for((tmp_path / RUN_FOLDERS[1] / "log.jsonl").exists, process)  # evaluated before training, and nothing saved
    process.send_signal(number)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == code
    where = re.search(
        r"^sinkformers: stopped\. n-3, seed 0 is saved at (epoch \d, step \d+); the same command continues there\.$",
        complaint,
        re.MULTILINE,
    )
    assert where, complaint
    assert "Traceback" not in complaint
    with locked(tmp_path / RUN_FOLDERS[1]) as held:
        assert held
    said = finish("--out", tmp_path, "--arms", "n-3")
    assert f"n-3, seed 0: continues after {where[1]}." in said.splitlines()
    assert (tmp_path / RUN_FOLDERS[1] / METRICS_FILE).read_bytes() == whole[1]


def test_a_run_stopped_while_reading_data_says_that_nothing_was_saved(tmp_path):
    """A worker stops when its standard input ends, here as soon as it checks."""
    process = subprocess.run(
        [*COMMAND, "--out", str(tmp_path)],
        env={**os.environ, "SINKFORMERS_WORKER": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 143
    assert re.fullmatch(
        r"sinkformers: stopped\. (What is finished is kept, and the same command does the rest"
        r"|n-1, seed 0 has saved nothing yet; the same command begins it again)\.\n",
        process.stderr,
    )
    assert not list(tmp_path.rglob("checkpoint*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent_process(start, tmp_path, number):
    # Forty epochs, so that they are still running when they are stopped.
    command = [*COMMAND[:4], "figure2-mnist", "--preset", "smoke", "--arms", "cls-*"]
    process = start("--out", tmp_path, "--jobs", "5000", command=command)
    folders = [tmp_path / "figure2-mnist" / "smoke" / f"cls-n-{n}" / "seed-0" for n in (1, 5)]
    wait_for(lambda: all((folder / "log.jsonl").exists() for folder in folders), process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, complaint = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=60)
    for worker in alive:
        worker.kill()
    assert not alive
    assert len(workers) == 2
    for folder in folders:
        left = {file.name for file in folder.iterdir()}
        assert left == {"checkpoint.safetensors", "lock", "log.jsonl", "tensorboard"}
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        said = [line for line in complaint.splitlines() if line.startswith("sinkformers: stopped.")]
        saved = [re.fullmatch(r"sinkformers: stopped\. (.*), seed 0 is saved at .*\.", line) for line in said[:-1]]
        assert {match[1] for match in saved} == {"cls-n-1", "cls-n-5"}
        assert said[-1].endswith("0 of 2 runs are finished, and the same command continues with the others.")
        assert "Traceback" not in complaint


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_torchrun_stop_together_and_save(start, tmp_path, number):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command = [*launcher, *COMMAND[2:4], "figure2-mnist", "--preset", "smoke", "--arms", "cls-n-1"]
    process = start("--out", tmp_path, command=command)
    folder = tmp_path / "figure2-mnist" / "smoke" / "cls-n-1" / "seed-0"
    wait_for((folder / "log.jsonl").exists, process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for rank in alive:
        rank.kill()
    assert not alive
    assert len(ranks) >= 2
    left = {file.name for file in folder.iterdir()}
    assert left == {"checkpoint.safetensors", "lock", "log.jsonl", "tensorboard"}
    _, complaint = process.communicate(timeout=60)
    saved = re.findall(
        r"^sinkformers: stopped\. cls-n-1, seed 0 is saved at epoch \d+, step \d+;", complaint, re.MULTILINE
    )
    assert len(saved) == 1


def test_jobs_are_refused_under_torchrun(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(app, [*COMMAND[3:], "--jobs", "2", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr == (
        "sinkformers: --jobs cannot be used with torchrun, which starts several processes itself; leave it out.\n"
    )


def runs(n):
    return [Run("figure6", "small", Arm("n-1", {"n_iters": 1}), seed) for seed in range(n)]


@pytest.mark.parametrize(("jobs", "expected"), [(5000, 4), (2, 2), (1, 1)])
def test_there_are_no_more_processes_than_unfinished_runs(tmp_path, jobs, expected):
    for seed in (0, 3):
        write_run(tmp_path / "out", seed=seed)
    (tmp_path / "started").mkdir()
    script = f"import os, pathlib; pathlib.Path({str(tmp_path / 'started')!r}, str(os.getpid())).touch()"
    code = side_by_side([sys.executable, "-c", script], jobs, runs(6), tmp_path / "out", Display(quiet=True))
    assert code == 0
    assert len(list((tmp_path / "started").iterdir())) == expected


def test_no_process_is_started_if_all_runs_are_finished(tmp_path):
    write_run(tmp_path)
    assert side_by_side(["no such command"], 3, runs(1), tmp_path, Display(quiet=True)) == 0


def test_a_killed_worker_is_reported(tmp_path, capsys):
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert side_by_side([sys.executable, "-c", script], 2, runs(2), tmp_path, Display(quiet=True)) == 137
    assert capsys.readouterr().err == (
        "sinkformers: a process was ended by signal 9. The same command continues from its last checkpoint; "
        "where memory was short, run it with fewer --jobs.\n"
    )
