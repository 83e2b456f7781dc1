"""Jobs on this machine, through submitit's local executor: order, limits, preemption, cancellation and failure."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from sinkformers.lab.artefacts.artefact import JOB_FILE, JOB_LOG, METRICS_FILE, Arm, ExperimentError, Run
from sinkformers.lab.cluster.queue import LocalQueue
from sinkformers.lab.cluster.request import Request
from sinkformers.lab.cluster.resources import Resources
from sinkformers.lab.cluster.waiting import last_words
from sinkformers.lab.workbench.locks import locked
from tests.lab.cluster import stand_in

ARMS = (Arm("first", {"n_iters": 1}), Arm("second", {"n_iters": 1}, after="first"), Arm("third", {"n_iters": 3}))
RUNS = tuple(Run("table2", "smoke", arm, 0) for arm in ARMS)


@pytest.fixture
def request_jobs(tmp_path, monkeypatch):
    """Request jobs that count instead of training; `counts` and `codes` are by the names of arms."""
    started = []

    def make(*runs, counts=None, codes=None, at_once=3):
        def command(request, run):
            return stand_in.command(
                request.out / run.folder, (counts or {}).get(run.arm.name, 3), (codes or {}).get(run.arm.name, 0)
            )

        monkeypatch.setattr(Request, "command", command)
        request = Request(runs or RUNS, tmp_path / "a 'b\"c", (), Resources(60), at_once)
        request.make_folder()
        return request

    yield make
    for process in psutil.Process().children(recursive=True):
        started.append(process)
        process.kill()
    psutil.wait_procs(started, timeout=10)


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def log_of(request, run):
    return (request.out / run.folder / JOB_LOG).read_text()


def job_process():
    """Return the process of the only job: submitit's, which runs the command."""
    (found,) = [each for each in psutil.Process().children(recursive=True) if "submitit.core._submit" in each.cmdline()]
    return found


def begin(request, run):
    """Start the queue; return it when the only run counts."""
    queue = LocalQueue(request)
    queue.states()
    until((request.out / run.folder / "running").exists)
    return queue


def test_a_run_begins_when_the_one_before_it_is_finished(request_jobs):
    request = request_jobs()
    queue = LocalQueue(request)
    seen = queue.states()
    assert seen == {RUNS[0].folder: "running", RUNS[1].folder: "pending", RUNS[2].folder: "running"}
    until(lambda: not queue.states())
    assert [(request.out / run.folder / METRICS_FILE).read_text() for run in RUNS] == ["counted to 3"] * 3
    times = [(request.out / run.folder / METRICS_FILE).stat().st_mtime for run in RUNS]
    assert times[0] < times[1]


def test_no_more_jobs_run_than_allowed(request_jobs):
    request = request_jobs(at_once=1)
    queue = LocalQueue(request)
    while states := queue.states():
        assert sum(state == "running" for state in states.values()) <= 1
        time.sleep(0.02)
    assert all((request.out / run.folder / METRICS_FILE).exists() for run in RUNS)


def test_a_run_after_a_failed_one_never_begins(request_jobs):
    request = request_jobs(*RUNS[:2], codes={"first": 2})
    queue = LocalQueue(request)
    until(lambda: not queue.states())
    assert last_words(request.out / RUNS[0].folder) == "it failed"
    assert not (request.out / RUNS[1].folder / JOB_LOG).exists()


def test_a_preempted_job_saves_and_continues_in_the_same_job(request_jobs):
    run = RUNS[0]
    request = request_jobs(run, counts={"first": 200})
    queue = begin(request, run)
    (submitted,) = request.folder.glob("*_submitted.pkl")
    submitted.with_name(f"{submitted.name}.save_tmp").touch()  # as if it had been killed while writing this
    job_process().send_signal(signal.SIGUSR2)
    until(lambda: not queue.states())
    assert (request.out / run.folder / METRICS_FILE).read_text() == "counted to 200"
    log = log_of(request, run)
    saved = int(log.partition("saved at ")[2].split()[0])
    assert f"begins at {saved}" in log
    assert log.count(" runs ") == 2
    ids = {line.split(" runs ")[0].split()[-1] for line in log.splitlines() if " runs " in line}
    assert len(ids) == 1  # the same job


def test_a_cancelled_job_saves_and_ends(request_jobs):
    run = RUNS[0]
    request = request_jobs(run, counts={"first": 10**6})
    queue = begin(request, run)
    message = queue.how_to_cancel()
    job = int(message.partition("kill ")[2].split()[0])
    os.kill(job, signal.SIGTERM)  # what the message says
    until(lambda: not queue.states())
    assert "saved at" in log_of(request, run)
    assert not (request.out / run.folder / METRICS_FILE).exists()


def test_a_run_saves_if_its_job_is_killed(request_jobs):
    run = RUNS[0]
    request = request_jobs(run, counts={"first": 10**6})
    queue = begin(request, run)
    job_process().kill()
    until(lambda: not queue.states())
    until(lambda: "saved at" in log_of(request, run))


def test_an_interrupt_does_not_reach_the_jobs(request_jobs):
    run = RUNS[0]
    request = request_jobs(run, counts={"first": 100})
    queue = begin(request, run)
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGHUP)
    until(lambda: not queue.states())
    assert (request.out / run.folder / METRICS_FILE).exists()
    assert "saved at" not in log_of(request, run)


def test_a_run_that_another_process_trains_is_left_to_it(request_jobs):
    request = request_jobs(RUNS[0], RUNS[2])
    with locked(request.out / RUNS[0].folder) as held:
        assert held
        queue = LocalQueue(request)
        assert queue.elsewhere == [RUNS[0]]
        assert set(queue.states()) == {RUNS[2].folder}
        until(lambda: not queue.states())


def test_the_job_file_goes_when_the_run_is_finished(request_jobs):
    request = request_jobs(RUNS[0])
    folder = request.out / RUNS[0].folder
    folder.mkdir(parents=True)
    (folder / JOB_FILE).write_text("{}")
    queue = LocalQueue(request)
    until(lambda: not queue.states())
    assert not (folder / JOB_FILE).exists()


@pytest.mark.parametrize("name", ["100%", "a\nb"])
def test_folders_that_log_files_cannot_have_are_refused(tmp_path, name):
    request = Request(RUNS, tmp_path / name, (), Resources(60))
    with pytest.raises(ExperimentError, match=r"contains .* Choose another --out"):
        request.make_folder()


def test_the_command_of_a_job_trains_one_run(tmp_path):
    alone = Request(RUNS, tmp_path, ("--device", "cpu"), Resources(60)).command(RUNS[2])
    together = Request(RUNS, tmp_path, (), Resources(60, processes=2)).command(RUNS[2])
    assert alone[1:] == (
        *("-m", "sinkformers.lab.cli", "run", "table2", "--preset", "smoke", "--arms", "third", "--seeds", "0"),
        *("--out", str(tmp_path), "--device", "cpu"),
    )
    assert together[1:5] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert Path(alone[0]).is_absolute()
