"""Downloads: only the right content gets the name of a file, whatever servers and disks do."""

import errno
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sinkformers.lab.data import CATALOGUE, DataError, DataFile, DataSet, fetch
from sinkformers.lab.data.store import fetching
from sinkformers.lab.data.store.fetching import download
from tests.lab.data.server import Server

CONTENT = random.Random(0).randbytes(1_000_003)
PATH = "toy/some/file.bin"


@pytest.fixture
def server():
    with Server() as running:
        running.files["/file.bin"] = CONTENT
        yield running


@pytest.fixture
def mirror():
    with Server() as running:
        running.files["/file.bin"] = CONTENT
        yield running


def toy_file(*servers, path=PATH, content=CONTENT, **settings):
    urls = tuple(f"{server.url}/{Path(path).name}" for server in servers)
    return DataFile(path, len(content), hashlib.sha256(content).hexdigest(), urls, **settings)


def names(folder):
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def test_a_download_leaves_one_file_readable_as_others(tmp_path, server):
    target = download(toy_file(server), tmp_path)
    assert target == tmp_path / PATH
    assert target.read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]
    (tmp_path / "other").touch()
    assert target.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("progress", [False, True])
def test_a_progress_bar_is_shown_on_request(tmp_path, server, capsys, progress):
    download(toy_file(server), tmp_path, progress=progress)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("100%" in shown.err) is progress


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"files": {"/file.bin": CONTENT[:-1] + b"?"}}, "wrong checksum"),
        ({"files": {"/file.bin": CONTENT + b"?"}}, "wrong checksum"),
        ({"files": {}}, "HTTP 404"),
        ({"break_after": 300_007}, "wrong checksum"),
        ({"delay": 2.0}, "timed out"),
        ({"RequestHandlerClass": lambda request, *_: request.close()}, "closed connection|reset by peer"),
    ],
    ids=["other bytes", "more bytes", "no file", "breaks off", "hangs", "hangs up"],
)
def test_wrong_content_never_gets_the_name(tmp_path, server, mirror, settings, reason, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT", 0.5)
    vars(server).update(settings)
    with pytest.raises(
        DataError, match=rf"file\.bin could not be downloaded \({server.url}/file\.bin: .*({reason}).*\); try again"
    ):
        download(toy_file(server), tmp_path)
    assert not names(tmp_path)
    assert download(toy_file(server, mirror), tmp_path).read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_the_timeout_is_not_left_behind(tmp_path, server):
    download(toy_file(server), tmp_path)
    assert socket.getdefaulttimeout() is None


def test_every_mirror_that_failed_is_named(tmp_path, server):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        unreachable = f"http://127.0.0.1:{unused.getsockname()[1]}/file.bin"
        server.files.clear()
        file = toy_file(server)
        file = DataFile(file.path, file.size, file.sha256, (unreachable, *file.urls))
        with pytest.raises(DataError) as caught:
            download(file, tmp_path)
    assert f"{unreachable}: [Errno {errno.ECONNREFUSED}]" in str(caught.value)
    assert f"{server.url}/file.bin: HTTP 404" in str(caught.value)


def test_a_killed_download_is_repeated_and_leaves_nothing_else(tmp_path, server):
    server.break_after = 300_007
    server.files["/file.bin"] = CONTENT
    code = f"""
import os, signal, torch.hub
from pathlib import Path
from sinkformers.lab.data import DataFile
from sinkformers.lab.data.store.fetching import download
torch.hub.hashlib.sha256 = lambda: os.kill(os.getpid(), signal.SIGKILL)
download(DataFile({PATH!r}, 1, "0" * 64, ({server.url + "/file.bin"!r},)), Path({str(tmp_path)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert [name.rpartition(".")[2] for name in names(tmp_path)] == ["partial"]
    server.break_after = None
    assert download(toy_file(server), tmp_path).read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_two_processes_may_download_the_same_file(tmp_path, server):
    server.delay = 0.5  # both have begun before one is finished
    code = f"""
from pathlib import Path
from sinkformers.lab.data import DataFile
from sinkformers.lab.data.store.fetching import download
download(DataFile(*{(PATH, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), (f"{server.url}/file.bin",))!r}),
         Path({str(tmp_path)!r}))
"""
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    # The first to finish removes partial files, and may take that of the other: then the file is there already.
    assert 0 in [process.returncode for process in both], errors
    assert (tmp_path / PATH).read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_read_only_folder_is_refused_before_a_request(tmp_path, server, read_only):
    read_only(tmp_path)
    with pytest.raises(DataError, match=r"some is read-only; make it writable, or choose another folder with --data"):
        download(toy_file(server), tmp_path)
    assert not server.requested


def test_a_full_disk_is_one_sentence(tmp_path, server, monkeypatch):
    def full(*_args, **_settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.hub.download_url_to_file", full)
    with pytest.raises(
        DataError, match=r"file\.bin cannot be written \(No space left on device\); free some space, or choose"
    ):
        download(toy_file(server), tmp_path)
    assert not (tmp_path / PATH).exists()


@pytest.fixture
def toy_set(monkeypatch):
    def register(*files):
        entry = DataSet("toy", "A toy", "none", by_hand="ask somebody and put it into toy/", files=files)
        monkeypatch.setitem(CATALOGUE, "toy", entry)

    return register


def test_only_missing_and_damaged_files_are_fetched(tmp_path, server, toy_set):
    contents = {"right": b"right", "damaged": b"damaged", "missing": b"missing"}
    server.files = {f"/{name}": content for name, content in contents.items()}
    toy_set(*(toy_file(server, path=f"toy/{name}", content=content) for name, content in contents.items()))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "right").write_bytes(b"right")
    (tmp_path / "toy" / "damaged").write_bytes(b"damagEd")
    assert fetch("toy", tmp_path) == [tmp_path / "toy" / "damaged", tmp_path / "toy" / "missing"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "toy").iterdir()} == contents
    assert server.requested == ["/damaged", "/missing"]
    assert fetch("toy", tmp_path) == []


def test_a_damaged_file_stays_until_the_right_one_is_there(tmp_path, server, toy_set):
    server.files["/file.bin"] = b"?"
    toy_set(toy_file(server))
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / PATH).write_bytes(b"damaged")
    with pytest.raises(DataError, match="could not be downloaded"):
        fetch("toy", tmp_path)
    assert (tmp_path / PATH).read_bytes() == b"damaged"


def test_alternatives_and_files_that_vary_are_not_fetched(tmp_path, server, toy_set):
    toy_set(toy_file(server, path="toy/a", alternatives=("other/a",)), toy_file(server, path="toy/b", varies=True))
    for path in ("other/a", "toy/b"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(b"another version")
    assert fetch("toy", tmp_path) == []
    assert not server.requested


def test_a_set_that_cannot_be_downloaded_says_how_to_get_it(tmp_path, server, toy_set):
    toy_set(toy_file(server), toy_file(path="toy/closed"), toy_file(path="toy/extra", optional=True))
    with pytest.raises(DataError) as caught:
        fetch("toy", tmp_path)
    assert str(caught.value) == (
        f"toy cannot be downloaded automatically: ask somebody and put it into toy/ of the data folder, {tmp_path}."
    )
    assert not server.requested
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "closed").write_bytes(CONTENT)
    assert fetch("toy", tmp_path) == [tmp_path / PATH]


def test_embedded_sets_need_no_download(tmp_path):
    assert fetch("digits", tmp_path) == []
    assert not names(tmp_path)
