"""Runs as jobs of a real Slurm on this machine: disturbed in every way, they end with the bytes of undisturbed ones.

`make test-slurm` runs these tests; they need the Debian packages slurm-wlm and munge.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sinkformers.lab.artefacts.artefact import (
    JOB_FILE,
    JOB_LOG,
    METRICS_FILE,
    MODEL_FILE,
    RUN_FILE,
    Arm,
    ExperimentError,
    Run,
)
from sinkformers.lab.cluster import slurm, submission
from sinkformers.lab.cluster.request import Request
from sinkformers.lab.cluster.resources import Resources
from tests.lab.cluster import stand_in
from tests.slurm.one_node import GRACE, one_node

pytestmark = pytest.mark.slurm

# So many normalisations that a training still runs when it is disturbed: some seconds of one processor, where the
# command of Slurm that disturbs it takes some tenths.
MANY = (2001, 2003)
COMMAND = [sys.executable, "-m", "sinkformers.lab.cli", "run", "figure5", "--preset", "smoke"]
LONG = [*COMMAND, "--n-iters", ",".join(map(str, MANY))]
ON_SLURM = [*LONG, "--cluster", "slurm"]
FOLDERS = [Path("figure5", "smoke", f"n-{n_iters}", "seed-0") for n_iters in MANY]
OF_TWO = [*COMMAND, "--n-iters", str(MANY[0]), "--processes", "2", "--cluster", "slurm"]


@pytest.fixture(scope="module")
def cluster():
    with one_node() as environment:
        yield environment


@pytest.fixture
def call(cluster):
    """Run a command in the cluster's environment; return what it printed."""

    def run(*command, code=0, seconds=300):
        done = subprocess.run([*map(str, command)], env=cluster, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory):
    """Return the bytes of both runs, trained in an array that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    subprocess.run([*ON_SLURM, "--out", str(out), "--wait"], env=cluster, check=True, timeout=300)
    return bytes_of(out)


def bytes_of(out, folders=FOLDERS):
    return [(out / folder / name).read_bytes() for folder in folders for name in (METRICS_FILE, MODEL_FILE)]


def until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def submitted(said):
    """Return the id of the array that the command has submitted."""
    return said.partition(" submitted as job ")[2].partition(",")[0]


def begun(out, folders=FOLDERS):
    """Return whether all runs have been evaluated before training."""
    return all((out / folder / "log.jsonl").exists() for folder in folders)


def finished(out, folders=FOLDERS):
    return all((out / folder / METRICS_FILE).exists() for folder in folders)


def test_jobs_train_what_the_command_alone_trains(whole, call, tmp_path):
    one_thread = ["env", "OMP_NUM_THREADS=1"]
    call(*one_thread, *LONG, "--out", tmp_path)
    assert bytes_of(tmp_path) == whole


def test_preempted_and_requeued_jobs_end_with_the_same_bytes(whole, call, tmp_path):
    """Task 0 receives the signal that announces the time limit; task 1 is put back into the queue by its owner."""
    array = submitted(call(*ON_SLURM, "--out", tmp_path))
    until(lambda: begun(tmp_path))
    call("scancel", "--signal=USR2", f"{array}_0")
    call("scontrol", "requeue", f"{array}_1")
    until(lambda: finished(tmp_path))
    assert bytes_of(tmp_path) == whole
    for index, folder in enumerate(FOLDERS):
        log = (tmp_path / folder / JOB_LOG).read_text()
        assert log.count(f"job {array}_{index} runs ") == 2
        assert ": continues after epoch " in log
        assert json.loads((tmp_path / folder / RUN_FILE).read_text())["resumed"] == 1


def test_a_cancelled_array_continues_when_it_is_submitted_again(whole, call, tmp_path):
    first = submitted(call(*ON_SLURM, "--out", tmp_path))
    until(lambda: begun(tmp_path))
    call("scancel", first)
    until(lambda: not call("squeue", "--noheader"))
    assert not finished(tmp_path)
    assert "is saved at epoch" in (tmp_path / FOLDERS[1] / JOB_LOG).read_text()
    said = call(*ON_SLURM, "--out", tmp_path, "--wait")
    assert "Written to" in said  # the report
    assert submitted(said) != first
    assert bytes_of(tmp_path) == whole
    assert not (tmp_path / FOLDERS[0] / JOB_FILE).exists()


@pytest.mark.parametrize("partition", ["low", "grace"])
def test_jobs_that_make_way_for_others_continue_later(whole, call, tmp_path, partition):
    """In the partition `grace`, Slurm leaves them running for a minute after SIGTERM: they save and go at once."""
    call(*ON_SLURM, "--out", tmp_path, "--partition", partition)
    until(lambda: begun(tmp_path))
    began = time.monotonic()
    marker = tmp_path / "other"
    call("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", f"--wrap=touch '{marker}'")
    until(marker.exists)
    assert time.monotonic() - began < GRACE
    assert not finished(tmp_path)
    for folder in FOLDERS:
        assert "is saved at epoch" in (tmp_path / folder / JOB_LOG).read_text()
    until(lambda: finished(tmp_path))
    assert bytes_of(tmp_path) == whole


@pytest.fixture(scope="module")
def whole_of_two(cluster, tmp_path_factory):
    """Return the bytes of a run that two processes of an undisturbed job trained."""
    out = tmp_path_factory.mktemp("whole-of-two")
    subprocess.run([*OF_TWO, "--out", str(out), "--wait"], env=cluster, check=True, timeout=300)
    return bytes_of(out, FOLDERS[:1])


@pytest.mark.parametrize("disturbance", ["almost out of time", "requeued", "cancelled"])
def test_two_processes_of_a_job_stop_and_continue_together(whole_of_two, call, tmp_path, disturbance):
    job = submitted(call(*OF_TWO, "--out", tmp_path))
    until(lambda: begun(tmp_path, FOLDERS[:1]))
    if disturbance == "cancelled":
        call("scancel", job)
        until(lambda: not call("squeue", "--noheader"))
        call(*OF_TWO, "--out", tmp_path)
    else:
        call(*(("scontrol", "requeue") if disturbance == "requeued" else ("scancel", "--signal=USR2")), job)
    until(lambda: finished(tmp_path, FOLDERS[:1]))
    assert bytes_of(tmp_path, FOLDERS[:1]) == whole_of_two
    record = json.loads((tmp_path / FOLDERS[0] / RUN_FILE).read_text())
    assert (record["processes"], record["resumed"]) == (2, 1)
    assert ": continues after epoch " in (tmp_path / FOLDERS[0] / JOB_LOG).read_text()


def test_records_say_nothing_of_the_cluster(whole, cluster):
    for content in whole[::2]:
        record = content.decode()
        for word in ("slurm", "SLURM", cluster["SLURM_CONF"], os.uname().nodename + '"', "partition"):
            assert word not in record


def test_a_run_in_the_queue_is_not_submitted_again(call, tmp_path):
    blocker = call("sbatch", "--parsable", "--exclusive", "--output=/dev/null", "--wrap=sleep 60").strip()
    first = submitted(call(*ON_SLURM, "--out", tmp_path))
    again = call(*ON_SLURM, "--out", tmp_path)
    names = [f"n-{n_iters}, seed 0: in the queue as job {first}_{index}" for index, n_iters in enumerate(MANY)]
    assert again.splitlines() == names
    preview = call(*ON_SLURM, "--out", tmp_path, "--dry-run")
    assert preview.startswith(again)
    assert "no runs would be submitted" in preview
    call("scancel", first, blocker)
    assert f"job {first}" not in call(*ON_SLURM, "--out", tmp_path, "--dry-run")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--partition", "absent"], "Slurm refuses the jobs: invalid partition specified: absent; Batch job"),
        (["--gpus", "1"], "Slurm refuses the jobs: Invalid generic resource (gres) specification. sinfo shows"),
        (["--time", "2-0"], "--time 2-0 is 48 h, and the partition allows 1 h. Ask for less: a run that needs longer"),
    ],
)
def test_what_slurm_refuses_is_said_in_one_sentence(call, tmp_path, options, sentence):
    complaint = call(*ON_SLURM, *options, "--out", tmp_path, code=2)
    assert complaint.startswith(f"sinkformers: {sentence}")
    assert len(complaint.splitlines()) == 1
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "lock"]


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_waits_for_the_one_that_it_continues(cluster, monkeypatch, tmp_path, code):
    arms = (Arm("first", {"n_iters": 1}), Arm("second", {"n_iters": 3}, after="first"))
    runs = tuple(Run("table2", "smoke", arm, seed) for seed in (0, 1) for arm in arms)
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster[name])
    monkeypatch.setattr(
        Request,
        "command",
        lambda self, run: stand_in.command(self.out / run.folder, code=code if run == runs[0] else 0),
    )
    request = Request(runs, tmp_path, (), Resources(10))
    new, queued = submission.submit(request)
    assert not queued
    assert len(slurm.arrays(new.values())) == 3  # an array of two, and two jobs that wait for one task each
    until(lambda: not slurm.queue(new.values()))
    done = [(tmp_path / run.folder / METRICS_FILE).exists() for run in runs]
    assert done == [not code, not code, True, True]
    with pytest.raises(ExperimentError, match=r"continues with the model of first, .* Leave --arms out"):
        submission.submit(request._replace(runs=(Run("table2", "smoke", arms[1], 2),)))
