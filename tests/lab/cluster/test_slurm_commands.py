"""What is read from Slurm's commands, here scripts that answer as Slurm does."""

import pytest

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.cluster import slurm


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Put a command on PATH, alone, that prints a text or complains."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name, text="", complaint="", code=0):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n[ -z '{complaint}' ] || echo '{complaint}' >&2\nprintf '{text}'\nexit {code}\n")
        script.chmod(0o755)

    return put


def test_the_queue_has_the_jobs_that_were_asked_for(answer):
    answer("squeue", "12_0|RUNNING|None\\n12_1|PENDING|Resources\\n12_2|PENDING|Priority\\n7|COMPLETING|None\\n")
    found = slurm.queue(["12_0", "12_1", "7", "8"])
    assert {job: str(each) for job, each in found.items()} == {
        "12_0": "running",
        "12_1": "pending (Resources)",
        "7": "completing",
    }


def test_no_question_is_asked_about_no_jobs(answer):
    answer("squeue", code=1)
    assert slurm.queue([]) == {}


def test_a_job_that_slurm_has_forgotten_is_not_in_the_queue(answer):
    answer("squeue", complaint="slurm_load_jobs error: Invalid job id specified", code=1)
    assert slurm.queue(["3"]) == {}
    assert slurm.is_ending("3")


def test_a_cluster_that_does_not_answer_is_an_error(answer):
    answer("squeue", complaint="squeue: error: Unable to contact slurm controller (connect failure)", code=1)
    with pytest.raises(ExperimentError, match=r"^squeue does not answer: Unable to contact slurm controller \(connect"):
        slurm.queue(["3"])
    assert slurm.is_ending("3") is None


@pytest.mark.parametrize(("state", "ending"), [("COMPLETING", True), ("CANCELLED", True), ("RUNNING", False)])
def test_a_cancelled_job_is_ending(answer, state, ending):
    answer("squeue", f"5|{state}|None\\n")
    assert slurm.is_ending("5") is ending


@pytest.mark.parametrize(
    ("partition", "expected"), [(None, 60), ("short", 60), ("long", 2880), ("endless", None), ("absent", None)]
)
def test_the_time_limit_is_that_of_the_partition(answer, partition, expected):
    answer("sinfo", "short*|1:00:00\\nlong|2-00:00:00\\nendless|infinite\\n")
    assert slurm.time_limit(partition) == expected


def test_without_sinfo_the_time_limit_is_unknown(answer):
    answer("squeue")
    assert slurm.time_limit(None) is None


def test_a_machine_without_slurm_is_refused(answer):
    with pytest.raises(ExperimentError, match=r"there is no sbatch on PATH\. .*--cluster local"):
        slurm.require()
    for name in ("sbatch", "squeue", "srun"):
        answer(name)
    slurm.require()


def test_what_slurm_says_becomes_one_sentence():
    complaint = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed.\n\n"
    assert slurm.said(complaint) == "invalid partition specified: x; Batch job submission failed"
    assert slurm.said("") == "it gives no reason"
