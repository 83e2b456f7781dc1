"""Hostile and damaged archives: nothing is written outside the new folder."""

import io
import stat
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkformers.lab.data import DataError, unpack
from sinkformers.lab.data.store import archives

FILES = {"top.txt": b"top", "folder/below.txt": b"below" * 1000, "folder/deeper/empty": b""}


def make_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_tar(path, files):
    with tarfile.open(path, f"w:{path.suffix[1:]}" if path.suffix != ".tar" else "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def make(path, files):
    return make_zip(path, files) if path.suffix == ".zip" else make_tar(path, files)


def special_zip(path, mode):
    info = zipfile.ZipInfo("special")
    info.external_attr = (mode | 0o644) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    return path


def special_tar(path, kind, target=""):
    info = tarfile.TarInfo("special")
    info.type, info.linkname = kind, target
    with tarfile.open(path, "w") as archive:
        archive.addfile(info)
    return path


def tree(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_files_are_unpacked_unchanged(tmp_path, name):
    archive = make(tmp_path / name, FILES)
    into = tmp_path / "new" / "folder"
    assert unpack(archive, into) == into
    assert {path: content for path, content in tree(into).items() if content is not False} == FILES
    assert [path.name for path in into.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_a_single_folder_of_the_same_name_becomes_the_folder(tmp_path, name):
    archive = make(tmp_path / name, {"a/below.txt": b"below", "a/a/deeper.txt": b"deeper"})
    into = unpack(archive, tmp_path / "a")
    assert {path: content for path, content in tree(into).items() if content is not False} == {
        "below.txt": b"below",
        "a/deeper.txt": b"deeper",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", name]


def test_the_folder_of_another_process_is_kept(tmp_path, monkeypatch):
    archive = make_zip(tmp_path / "a.zip", FILES)
    into = tmp_path / "into"
    extract = archives._extract

    def extract_after_another_process(*args):
        into.mkdir(exist_ok=True)
        (into / "top.txt").write_bytes(b"top")
        extract(*args)

    monkeypatch.setattr(archives, "_extract", extract_after_another_process)
    assert unpack(archive, into) == into
    assert tree(into) == {"top.txt": b"top"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "into"]


def test_empty_folders_are_created(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("empty")
        info.type, info.mode = tarfile.DIRTYPE, 0o000
        archive.addfile(info)
    make_zip(tmp_path / "a.zip", {"empty/": b""})
    for name in ("a.tar", "a.zip"):
        made = unpack(tmp_path / name, tmp_path / f"{name}.out") / "empty"
        assert made.is_dir()
        assert made.stat().st_mode & 0o700 == 0o700


@pytest.mark.parametrize("name", ["../evil", "folder/../../evil", ".."])
def test_a_tar_member_outside_the_folder_is_refused(tmp_path, name):
    archive = make_tar(tmp_path / "hostile.tar", {"harmless": b"1", name: b"2"})
    before = tree(tmp_path)
    with pytest.raises(DataError, match=r"hostile\.tar is not safe to unpack \('.+outside the destination\); get it"):
        unpack(archive, tmp_path / "into")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
@pytest.mark.parametrize("name", ["/evil", "C:/evil", "C:evil", "..\\evil", "\\evil", "\\\\host\\share\\evil"])
def test_absolute_names_are_confined_to_the_folder(tmp_path, suffix, name):
    archive = make(tmp_path / f"hostile{suffix}", {"harmless": b"1", name: b"2"})
    into = unpack(archive, tmp_path / "into")
    assert sorted(path.name for path in tmp_path.iterdir()) == [archive.name, "into"]
    assert sorted(content for content in tree(into).values() if content is not False) == [b"1", b"2"]


@pytest.mark.parametrize("name", ["../evil", "folder/../../evil"])
def test_a_zip_member_outside_the_folder_is_confined_to_it(tmp_path, name):
    into = unpack(make_zip(tmp_path / "hostile.zip", {"harmless": b"1", name: b"2"}), tmp_path / "into")
    assert (into / "harmless").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostile.zip", "into"]
    assert [path.read_bytes() for path in into.rglob("evil")] == [b"2"]


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_links_and_devices_of_a_zip_archive_are_plain_files(tmp_path, mode):
    into = unpack(special_zip(tmp_path / "a.zip", mode), tmp_path / "into")
    assert stat.S_ISREG((into / "special").lstat().st_mode)
    assert (into / "special").read_bytes() == b"/etc/passwd"


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (tarfile.SYMTYPE, "../../outside"),
        (tarfile.SYMTYPE, "/etc/passwd"),
        (tarfile.SYMTYPE, "inside"),
        (tarfile.LNKTYPE, "../outside"),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
        (tarfile.FIFOTYPE, ""),
    ],
)
def test_links_and_devices_of_a_tar_archive_are_refused(tmp_path, kind, target):
    archive = special_tar(tmp_path / "a.tar", kind, target)
    before = tree(tmp_path)
    with pytest.raises(DataError, match=r"a\.tar is not safe to unpack \('special' is a special file\); get it"):
        unpack(archive, tmp_path / "into")
    assert tree(tmp_path) == before


PIECES = st.lists(st.sampled_from(["..", ".", "a", "b", "/", "//", "\\", "C:", "~", " ", "…", "x" * 300]), max_size=6)


@given(
    pieces=st.lists(PIECES, min_size=1, max_size=4),
    suffix=st.sampled_from([".zip", ".tar"]),
    joint=st.sampled_from("/\\"),
)
def test_no_name_writes_outside(pieces, suffix, joint):
    names = [joint.join(piece) or "empty" for piece in pieces]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "deep" / "down"
        folder.mkdir(parents=True)
        archive = make(folder / f"a{suffix}", dict.fromkeys(names, b"content"))
        before = tree(Path(name))
        try:
            into = unpack(archive, folder / "into")
        except DataError:
            assert tree(Path(name)) == before
        else:
            outside = {path: content for path, content in tree(Path(name)).items() if "/into" not in path}
            assert outside == before
            assert all(into.resolve() in path.resolve().parents for path in into.rglob("*"))


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz"])
def test_a_damaged_archive_is_named_and_leaves_nothing(tmp_path, name):
    archive = make(tmp_path / name, {"first": b"1" * 5000, "second": bytes(range(256)) * 100})
    content = bytearray(archive.read_bytes())
    if name == "a.zip":
        content[40] ^= 0xFF  # in the middle of the first member
    archive.write_bytes(content if name == "a.zip" else content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"{name} is damaged \(.+\); delete it and get it again"):
        unpack(archive, tmp_path / "into")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_is_not_an_archive_is_refused(tmp_path):
    (tmp_path / "page.zip").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"page\.zip is damaged"):
        unpack(tmp_path / "page.zip", tmp_path / "into")


@pytest.mark.parametrize("name", ["bomb.zip", "bomb.tar.gz"])
def test_an_archive_over_the_size_limit_is_refused(tmp_path, name):
    archive = make(tmp_path / name, {"zeros": bytes(10_000)})
    with pytest.raises(DataError, match="would unpack to 10,000 bytes, over the limit of 9,999; check its origin"):
        unpack(archive, tmp_path / "into", most_bytes=9_999)
    assert unpack(archive, tmp_path / "into", most_bytes=10_000)


def test_an_existing_folder_is_not_changed(tmp_path):
    archive = make_zip(tmp_path / "a.zip", FILES)
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(DataError, match=r"into exists already, so .*a\.zip was not unpacked; delete the folder first"):
        unpack(archive, into)
    assert not list(into.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    archive = make_zip(tmp_path / "a.zip", FILES)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"a\.zip cannot be unpacked to .*into \(Not a directory\); free some space"):
        unpack(archive, tmp_path / "file" / "into")


def test_a_missing_archive_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.zip cannot be unpacked to .* \(No such file or directory\)"):
        unpack(tmp_path / "gone.zip", tmp_path / "into")
