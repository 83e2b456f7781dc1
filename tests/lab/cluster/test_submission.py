"""What is handed to sbatch, here a script that answers as Slurm does: arrays, dependencies, nothing twice."""

import json
import re
import shutil
import sys

import pytest
from filelock import FileLock

from sinkformers.lab.artefacts.artefact import JOB_FILE, Arm, ExperimentError, Run
from sinkformers.lab.cluster import submission
from sinkformers.lab.cluster.request import Request
from sinkformers.lab.cluster.resources import Resources
from sinkformers.lab.workbench.locks import LOCK_FILE
from tests.lab.fake_runs import write_run

ARMS = (Arm("first", {"n_iters": 1}), Arm("second", {"n_iters": 3}, after="first"))
RUNS = tuple(Run("table2", "smoke", arm, seed) for seed in (0, 1) for arm in ARMS)

SBATCH = """#!{python}
import pathlib, shutil, sys
kept = pathlib.Path({kept!r})
number = 10 + len(list(kept.iterdir()))
text = pathlib.Path(sys.argv[1]).read_text()
if "--partition=absent" in text:
    sys.exit("sbatch: error: invalid partition specified: absent")
(kept / str(number)).write_text(text)
print("Submitted batch job", number)
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Put Slurm's commands on PATH, alone; return the folder with the scripts that sbatch was given, by job ids."""
    commands, kept = tmp_path / "commands", tmp_path / "kept"
    commands.mkdir()
    kept.mkdir()
    for name, text in {
        "sbatch": SBATCH.format(python=sys.executable, kept=str(kept)),
        "srun": "#!/bin/sh\n",
        "squeue": f"#!/bin/sh\n{shutil.which('cat')} {tmp_path}/queue\n",
    }.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "queue").write_text("")
    monkeypatch.setenv("PATH", str(commands))
    return kept


def request_of(tmp_path, *runs, **resources):
    return Request(runs or RUNS, tmp_path / "out", (), Resources(60, **resources))


def options_of(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script.read_text(), re.MULTILINE))


def test_runs_are_an_array_and_those_that_continue_them_wait(scripts, tmp_path):
    new, queued = submission.submit(request_of(tmp_path, gpus=2, processes=2, cpus=3, partition="p"))
    assert queued == {}
    assert [new[run.folder] for run in RUNS] == ["10_0", "11", "10_1", "12"]
    array, second, third = (options_of(scripts / name) for name in ("10", "11", "12"))
    assert array["array"] == "0-1%2"
    assert (second["dependency"], third["dependency"]) == ("afterok:10_0", "afterok:10_1")
    assert "dependency" not in array
    for options in (array, second, third):
        assert options["partition"] == "p"
        assert (options["gpus-per-node"], options["cpus-per-task"], options["time"]) == ("2", "6", "60")
        assert options["signal"] == "USR2@120"
        assert "requeue" in options
    assert "--cpus-per-task=6" in (scripts / "10").read_text().splitlines()[-1]
    assert json.loads((tmp_path / "out" / RUNS[2].folder / JOB_FILE).read_text()) == {"slurm": "10_1"}


def test_only_runs_that_are_neither_finished_nor_queued_are_submitted(scripts, tmp_path):
    request = request_of(tmp_path)
    submission.submit(request)
    write = {"artefact": "table2", "preset": "smoke", "arm": "first"}
    shutil.rmtree(tmp_path / "out" / RUNS[0].folder)
    write_run(tmp_path / "out", seed=0, **write)
    (tmp_path / "queue").write_text("10_1|PENDING|Resources\n12|PENDING|Dependency\n")
    new, queued = submission.submit(request)
    assert queued == {RUNS[2].folder: "10_1", RUNS[3].folder: "12"}
    assert new == {RUNS[1].folder: "13"}  # what it continues is finished
    assert "dependency" not in options_of(scripts / "13")


def test_a_run_waits_for_one_that_was_in_the_queue(scripts, tmp_path):
    submission.submit(request_of(tmp_path, RUNS[0]))
    (tmp_path / "queue").write_text("10|RUNNING|None\n")
    new, _ = submission.submit(request_of(tmp_path, *RUNS[:2]))
    assert new == {RUNS[1].folder: "11"}
    assert options_of(scripts / "11")["dependency"] == "afterok:10"


def test_long_lists_are_several_arrays(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "LARGEST_ARRAY", 2)
    runs = [Run("table2", "smoke", ARMS[0], seed) for seed in range(5)]
    new, _ = submission.submit(request_of(tmp_path, *runs)._replace(at_once=1))
    assert list(new.values()) == ["10_0", "10_1", "11_0", "11_1", "12"]
    assert options_of(scripts / "10")["array"] == "0-1%1"


def test_a_refusal_leaves_no_files(scripts, tmp_path, capfd):
    with pytest.raises(ExperimentError, match=r"^Slurm refuses the jobs: invalid partition specified: absent\. sinfo"):
        submission.submit(request_of(tmp_path, partition="absent"))
    assert [file.name for file in (tmp_path / "out").rglob("*") if file.is_file()] == [LOCK_FILE]
    assert capfd.readouterr() == ("", "")
    assert not list(scripts.iterdir())


@pytest.mark.usefixtures("scripts")
def test_one_command_at_a_time_submits(tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "PATIENCE", 0.1)
    request = request_of(tmp_path)
    with (
        FileLock(request.make_folder() / LOCK_FILE),
        pytest.raises(ExperimentError, match="another command has been submitting runs to"),
    ):
        submission.submit(request)


@pytest.mark.usefixtures("scripts")
def test_a_damaged_job_file_counts_as_none(tmp_path):
    for content in ("", "[]", "{}", "{"):
        (tmp_path / JOB_FILE).write_text(content)
        assert submission.recorded_id(tmp_path) is None
