"""`sinkformers run`, stopped: what it says is true, and no process outlives it."""

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
    """Start the command; whatever happens in a test, it does not outlive it."""
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
            pytest.fail(f"it did not come to pass: {process.communicate()}")
        time.sleep(0.002)


def finish(*arguments):
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The records of both runs, trained without a disturbance."""
    out = tmp_path_factory.mktemp("whole")
    finish("--out", out)
    return [(out / run / METRICS_FILE).read_bytes() for run in RUN_FOLDERS]


@SIGNALS
def test_stopped_in_its_first_seconds_it_goes_on_at_the_step_where_it_was(whole, start, tmp_path, number, code):
    process = start("--out", tmp_path, "--arms", "n-3")
    wait_for((tmp_path / RUN_FOLDERS[1] / "log.jsonl").exists, process)  # evaluated before training, and nothing saved
    process.send_signal(number)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == code
    where = re.search(
        r"^sinkformers: stopped\. n-3, seed 0 is saved at (epoch \d, step \d+); the same command goes on there\.$",
        complaint,
        re.MULTILINE,
    )
    assert where, complaint
    assert "Traceback" not in complaint
    with locked(tmp_path / RUN_FOLDERS[1]) as held:
        assert held
    said = finish("--out", tmp_path, "--arms", "n-3")
    assert f"n-3, seed 0: goes on after {where[1]}." in said.splitlines()
    assert (tmp_path / RUN_FOLDERS[1] / METRICS_FILE).read_bytes() == whole[1]


def test_stopped_while_it_reads_nothing_was_saved_and_it_says_so(tmp_path):
    """As a worker, it is asked to end by the end of its standard input: at the first moment that it listens."""
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
def test_workers_end_with_the_process_that_started_them(start, tmp_path, number):
    # Forty epochs: they are not over before they are asked to end.
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
        assert said[-1].endswith("0 of 2 runs are finished, and the same command goes on with the others.")
        assert "Traceback" not in complaint


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_torchrun_end_with_it_and_save_together(start, tmp_path, number):
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


def test_under_torchrun_jobs_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(app, [*COMMAND[3:], "--jobs", "2", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr == (
        "sinkformers: --jobs is for a command that runs alone, and torchrun has started several; leave it out.\n"
    )


def runs(n):
    return [Run("figure6", "small", Arm("n-1", {"n_iters": 1}), seed) for seed in range(n)]


@pytest.mark.parametrize(("jobs", "expected"), [(5000, 4), (2, 2), (1, 1)])
def test_there_are_no_more_processes_than_cells_left_to_do(tmp_path, jobs, expected):
    for seed in (0, 3):
        write_run(tmp_path / "out", seed=seed)
    (tmp_path / "started").mkdir()
    script = f"import os, pathlib; pathlib.Path({str(tmp_path / 'started')!r}, str(os.getpid())).touch()"
    code = side_by_side([sys.executable, "-c", script], jobs, runs(6), tmp_path / "out", Display(quiet=True))
    assert code == 0
    assert len(list((tmp_path / "started").iterdir())) == expected


def test_where_every_cell_is_finished_nothing_is_started(tmp_path):
    write_run(tmp_path)
    assert side_by_side(["no such command"], 3, runs(1), tmp_path, Display(quiet=True)) == 0


def test_a_worker_that_was_killed_is_said_to_be(tmp_path, capsys):
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert side_by_side([sys.executable, "-c", script], 2, runs(2), tmp_path, Display(quiet=True)) == 137
    assert capsys.readouterr().err == (
        "sinkformers: a process was ended by signal 9. The same command goes on from its last checkpoint; "
        "where memory was short, run it with fewer --jobs.\n"
    )
