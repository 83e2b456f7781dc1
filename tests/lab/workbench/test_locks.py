"""Locks on runs: one holder at a time, and the lock of a process that was killed is free at once."""

import subprocess
import sys

import pytest
from filelock import FileLock

from sinkformers.lab.artefacts.artefact import METRICS_FILE, ExperimentError
from sinkformers.lab.workbench import locks
from sinkformers.lab.workbench.locks import LOCK_FILE, locked

HOLDER = """
import pathlib, subprocess, sys
from sinkformers.lab.workbench.locks import locked
print("ready", flush=True)
sys.stdin.readline()
with locked(pathlib.Path(sys.argv[1])) as held:
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print("held" if held else "not", child.pid, flush=True)
    sys.stdin.readline()
    child.kill()
"""


def is_free(folder):
    with locked(folder) as held:
        return held


@pytest.fixture
def start():
    """Start a process that locks a folder once it is given a line, and holds the lock until it is given another."""
    started = []

    def process(folder):
        command = [sys.executable, "-c", HOLDER, str(folder)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield process
    for each in started:
        each.kill()
        each.communicate()


def go(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def answer(process):
    word, child = process.stdout.readline().split()
    return word, int(child)


def test_one_of_several_processes_holds_the_lock(tmp_path, start):
    several = [start(tmp_path / "run") for _ in range(4)]
    for each in several:
        go(each)
    assert sorted(answer(each)[0] for each in several) == ["held", "not", "not", "not"]
    for each in several:
        go(each)
        assert each.wait(30) == 0
    assert is_free(tmp_path / "run")


def test_the_lock_of_a_killed_process_is_free_at_once_even_if_its_child_lives_on(tmp_path, start):
    first = start(tmp_path)
    go(first)
    word, child = answer(first)
    assert word == "held"
    assert not is_free(tmp_path)
    first.kill()
    first.wait()
    assert is_free(tmp_path)
    subprocess.run(["kill", str(child)], check=True)  # it was alive until now


def test_a_lock_is_held_within_the_block_only(tmp_path, monkeypatch):
    alive = []  # a lock that is deleted is released too, which would hide that it was not

    def make(path):
        alive.append(FileLock(path))
        return alive[-1]

    monkeypatch.setattr(locks, "FileLock", make)
    with locked(tmp_path) as held:
        assert held
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        raise KeyboardInterrupt
    assert is_free(tmp_path)


def test_a_lock_that_was_not_acquired_stays_with_its_holder(tmp_path):
    with locked(tmp_path):
        with locked(tmp_path) as second:
            assert not second
        assert not is_free(tmp_path)


def test_a_finished_run_has_no_lock_file_and_an_unfinished_one_keeps_it(tmp_path):
    with locked(tmp_path):
        pass
    assert [file.name for file in tmp_path.iterdir()] == [LOCK_FILE]
    with locked(tmp_path):
        (tmp_path / METRICS_FILE).write_text("{}")
    assert [file.name for file in tmp_path.iterdir()] == [METRICS_FILE]


def test_files_of_the_former_locks_do_no_harm(tmp_path):
    (tmp_path / "claim-7").write_text("{")
    assert is_free(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ExperimentError, match=r"cannot use .*file/run: .*Choose another --out"),
        locked(tmp_path / "file" / "run"),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(locks.FileLock, "acquire", refuse)
    with pytest.raises(ExperimentError, match=r"cannot use .*: Permission denied. Choose another"), locked(tmp_path):
        pass
