"""Downloads: whatever servers, disks and earlier attempts do, only the right bytes get the file's name."""

import fcntl
import hashlib
import os
import random
import socket
from pathlib import Path

import pytest

from sinkformers.lab.data import CATALOGUE, DataError, DataFile, DataSet, fetch
from sinkformers.lab.data.store import fetching
from sinkformers.lab.data.store.fetching import download
from tests.lab.data.server import Server

CONTENT = random.Random(0).randbytes(1_000_003)  # several chunks, and not a whole number of them
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


def with_part(folder, content):
    part = folder / f"{PATH}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(content)
    return part


def names(folder):
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def test_a_download_is_reported_and_leaves_one_file(tmp_path, server):
    told = []
    target = download(toy_file(server), tmp_path, progress=lambda *now: told.append(now))
    assert target == tmp_path / PATH
    assert target.read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]
    assert {(what, total) for what, _, total in told} == {("file.bin", len(CONTENT))}
    done = [done for _, done, _ in told]
    assert done == sorted(set(done))
    assert len(done) > 2
    assert done[-1] == len(CONTENT)


def test_a_broken_download_is_resumed_where_it_broke(tmp_path, server):
    server.break_after = 300_007
    with pytest.raises(
        DataError, match=r"could not be downloaded \(.*broke off after 300,007 of 1,000,003 bytes\); try"
    ):
        download(toy_file(server), tmp_path)
    assert names(tmp_path) == ["file.bin.part"]
    assert (tmp_path / f"{PATH}.part").read_bytes() == CONTENT[:300_007]

    server.break_after = None
    assert download(toy_file(server), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=300007-"]
    assert names(tmp_path) == ["file.bin"]


def test_a_mirror_goes_on_where_another_broke_off(tmp_path, server, mirror):
    server.break_after = 300_007
    assert download(toy_file(server, mirror), tmp_path).read_bytes() == CONTENT
    assert mirror.asked == [("/file.bin", "bytes=300007-")]


def test_a_server_without_ranges_starts_from_the_beginning(tmp_path, server):
    server.knows_ranges = False
    with_part(tmp_path, CONTENT[:300_007])
    assert download(toy_file(server), tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == 1


def test_a_refused_range_is_asked_for_as_a_whole(tmp_path, server):
    server.refuses_ranges = True
    with_part(tmp_path, CONTENT[:300_007])
    assert download(toy_file(server), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == ["bytes=300007-", None]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"skew": 1}, "another range than the one asked for"), ({"content_range": "all"}, "range without saying which")],
)
def test_a_range_that_does_not_fit_is_not_appended(tmp_path, server, settings, reason):
    vars(server).update(settings)
    part = with_part(tmp_path, CONTENT[:300_007])
    with pytest.raises(DataError, match=reason):
        download(toy_file(server), tmp_path)
    assert part.read_bytes() == CONTENT[:300_007]


def test_a_range_that_begins_earlier_is_joined_where_it_begins(tmp_path, server):
    server.skew = -7
    with_part(tmp_path, CONTENT[:300_007])
    assert download(toy_file(server), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("old", "asked"),
    [(b"?" * 300_007, ["bytes=300007-", None]), (CONTENT + b"?", [None]), (b"?" * len(CONTENT), [None])],
)
def test_a_part_of_something_else_is_thrown_away(tmp_path, server, old, asked):
    with_part(tmp_path, old)
    assert download(toy_file(server), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == asked


def test_a_part_that_is_whole_needs_no_server(tmp_path, server):
    with_part(tmp_path, CONTENT)
    assert download(toy_file(server), tmp_path).read_bytes() == CONTENT
    assert not server.asked


@pytest.mark.parametrize(
    ("served", "reason"),
    [(CONTENT[:-1] + b"?", "wrong checksum"), (CONTENT + b"?", "sent more than 1,000,003 bytes"), (None, "HTTP 404")],
)
def test_wrong_bytes_never_get_the_name(tmp_path, server, mirror, served, reason):
    if served is None:
        del server.files["/file.bin"]
    else:
        server.files["/file.bin"] = served
    with pytest.raises(
        DataError, match=rf"file\.bin could not be downloaded \({server.url}/file\.bin: .*{reason}\); try"
    ):
        download(toy_file(server), tmp_path)
    assert not names(tmp_path)
    assert download(toy_file(server, mirror), tmp_path).read_bytes() == CONTENT


def test_every_mirror_that_failed_is_named(tmp_path, server):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}/file.bin"
        server.files.clear()
        file = toy_file(server)
        file = DataFile(file.path, file.size, file.sha256, (nobody, *file.urls))
        with pytest.raises(DataError) as caught:
            download(file, tmp_path)
    assert f"{nobody}: [Errno" in str(caught.value)
    assert f"{server.url}/file.bin: HTTP 404" in str(caught.value)


def test_a_server_that_hangs_up_is_named(tmp_path, server):
    server.RequestHandlerClass = lambda request, *_: request.close()
    with pytest.raises(DataError, match="could not be downloaded"):
        download(toy_file(server), tmp_path)


def test_a_read_only_folder_is_refused_before_anything_is_asked(tmp_path, server, read_only):
    read_only(tmp_path)
    with pytest.raises(DataError, match=r"some is read-only; make it writable, or choose another folder with --data"):
        download(toy_file(server), tmp_path)
    assert not server.asked


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path, server):
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / f"{PATH}.part").symlink_to("/dev/full")
    with pytest.raises(
        DataError, match=r"file\.bin cannot be written \(No space left on device\); make room, or choose"
    ):
        download(toy_file(server), tmp_path)
    assert not (tmp_path / PATH).exists()


def test_a_second_process_is_told_to_wait(tmp_path, server):
    part = with_part(tmp_path, CONTENT[:300_007])
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"file\.bin\.part is being downloaded by another process; wait for it"):
            download(toy_file(server), tmp_path)
    assert part.read_bytes() == CONTENT[:300_007]


def test_a_part_that_another_process_just_finished_is_left_alone(tmp_path, server, monkeypatch):
    part = with_part(tmp_path, CONTENT)
    monkeypatch.setattr(fetching.fcntl, "flock", lambda *_: part.rename(tmp_path / PATH))
    with pytest.raises(DataError, match="by another process"):
        download(toy_file(server), tmp_path)
    assert (tmp_path / PATH).read_bytes() == CONTENT


@pytest.fixture
def toy_set(monkeypatch):
    def register(*files):
        entry = DataSet("toy", "A toy", "none", by_hand="ask somebody and put it into toy/", files=files)
        monkeypatch.setitem(CATALOGUE, "toy", entry)

    return register


def test_only_what_is_missing_or_damaged_is_fetched(tmp_path, server, toy_set):
    contents = {"right": b"right", "damaged": b"damaged", "missing": b"missing"}
    server.files = {f"/{name}": content for name, content in contents.items()}
    toy_set(*(toy_file(server, path=f"toy/{name}", content=content) for name, content in contents.items()))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "right").write_bytes(b"right")
    (tmp_path / "toy" / "damaged").write_bytes(b"damagEd")
    assert fetch("toy", tmp_path) == [tmp_path / "toy" / "damaged", tmp_path / "toy" / "missing"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "toy").iterdir()} == contents
    assert [path for path, _ in server.asked] == ["/damaged", "/missing"]
    assert fetch("toy", tmp_path) == []


def test_a_damaged_file_stays_until_there_is_a_better_one(tmp_path, server, toy_set):
    server.files["/file.bin"] = b"?"
    toy_set(toy_file(server))
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / PATH).write_bytes(b"damaged")
    with pytest.raises(DataError, match="could not be downloaded"):
        fetch("toy", tmp_path)
    assert (tmp_path / PATH).read_bytes() == b"damaged"


def test_what_serves_elsewhere_or_differs_between_users_is_left_alone(tmp_path, server, toy_set):
    toy_set(toy_file(server, path="toy/a", elsewhere=("other/a",)), toy_file(server, path="toy/b", varies=True))
    for path in ("other/a", "toy/b"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(b"somebody's own")
    assert fetch("toy", tmp_path) == []
    assert not server.asked


def test_what_nobody_may_download_is_got_by_hand(tmp_path, server, toy_set):
    toy_set(toy_file(server), toy_file(path="toy/closed"), toy_file(path="toy/extra", optional=True))
    with pytest.raises(DataError) as caught:
        fetch("toy", tmp_path)
    assert str(caught.value) == (
        f"toy cannot be fetched for you: ask somebody and put it into toy/ of the data folder, {tmp_path}."
    )
    assert not server.asked
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "closed").write_bytes(CONTENT)
    assert fetch("toy", tmp_path) == [tmp_path / PATH]


def test_embedded_sets_need_no_fetching(tmp_path):
    assert fetch("digits", tmp_path) == []
    assert not names(tmp_path)
