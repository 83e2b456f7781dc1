"""Claims on cells: one holder at a time, the dead are succeeded, the sleepers give up."""

import json
import os
import subprocess
import sys
import time

import pytest

from sinkformers.lab.artefacts.artefact import METRICS, ExperimentError
from sinkformers.lab.workbench import locks
from sinkformers.lab.workbench.locks import claim

RACE = """
import sys, pathlib
from sinkformers.lab.workbench.locks import claim
print("ready", flush=True)
sys.stdin.readline()
held = claim(pathlib.Path(sys.argv[1]))
print("held" if held else "not", flush=True)
sys.stdin.readline()
"""


def process(folder):
    command = [sys.executable, "-c", RACE, str(folder)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ready\n"
    return started


def tell(started, word="go\n"):
    started.stdin.write(word)
    started.stdin.flush()


def end(*started):
    for each in started:
        each.communicate("end\n", timeout=30)


def test_of_several_processes_one_holds(tmp_path):
    several = [process(tmp_path / "cell") for _ in range(4)]
    for each in several:
        tell(each)
    answers = [each.stdout.readline().strip() for each in several]
    end(*several)
    assert sorted(answers) == ["held", "not", "not", "not"]


def test_the_claim_of_a_killed_process_is_taken_over_at_once(tmp_path):
    first = process(tmp_path)
    tell(first)
    assert first.stdout.readline() == "held\n"
    assert claim(tmp_path) is None
    first.kill()
    first.communicate()
    assert claim(tmp_path).file.name == "claim-2"


def test_a_process_id_that_was_given_out_again_is_not_the_holder(tmp_path):
    held = claim(tmp_path)
    holder = json.loads(held.file.read_text())
    held.file.write_text(json.dumps({**holder, "born": holder["born"] - 1000}))
    assert claim(tmp_path) is not None


def test_another_machine_keeps_its_claim_for_the_length_of_the_lease(tmp_path):
    held = claim(tmp_path)
    holder = json.loads(held.file.read_text())
    held.file.write_text(json.dumps({**holder, "machine": "elsewhere", "pid": 1}))
    assert claim(tmp_path, lease=60) is None
    past = time.time() - 61
    os.utime(held.file, (past, past))
    assert claim(tmp_path, lease=60).file.name == "claim-2"


def test_a_holder_renews_its_claim_and_lets_it_go(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.01)
    held = claim(tmp_path)
    past = time.time() - 1000
    os.utime(held.file, (past, past))
    with held:
        deadline = time.monotonic() + 10
        while held.file.stat().st_mtime < past + 500:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        held.check()
    assert not list(tmp_path.iterdir())


def test_a_holder_that_was_asleep_gives_up(tmp_path):
    held = claim(tmp_path)
    held.check()
    (tmp_path / "claim-2").write_text("{}")
    with pytest.raises(ExperimentError, match="taken over by another process"):
        held.check()
    (tmp_path / "claim-2").unlink()
    held.check()
    (tmp_path / METRICS).write_text("{}")
    with pytest.raises(ExperimentError, match="taken over by another process"):
        held.check()


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_damaged_claim_counts_until_its_lease_is_over(tmp_path, content):
    file = tmp_path / "claim-7"
    file.write_text(content)
    assert claim(tmp_path, lease=60) is None
    os.utime(file, (0, 0))
    assert claim(tmp_path, lease=60).file.name == "claim-8"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExperimentError, match=r"cannot use .*file/cell: .*Choose another --out"):
        claim(tmp_path / "file" / "cell")
