"""The status of data sets: complete, incomplete, absent, corrupt or embedded."""

import hashlib
import importlib.metadata
import zipfile

import pytest

from sinkformers.lab.data import CATALOGUE, DataFile, DataSet, status_of


def toy_file(name, *, urls=(), **settings):
    content = name.encode()
    return DataFile(f"toy/{name}", len(content), hashlib.sha256(content).hexdigest(), urls, **settings)


def toy_set(*files):
    return DataSet("toy", "A toy", "none", by_hand="ask somebody and put it into toy/", files=files)


@pytest.fixture
def put(tmp_path):
    def write(*names, content=None):
        for name in names:
            path = tmp_path / "toy" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(name.encode() if content is None else content)

    return write


@pytest.mark.parametrize("verify", [False, True])
def test_absent_incomplete_complete(tmp_path, put, verify):
    entry = toy_set(*map(toy_file, "abcde"), toy_file("extra", optional=True))
    assert status_of(entry, tmp_path, verify=verify) == ("toy", "absent", "ask somebody and put it into toy/")
    put("extra")
    assert status_of(entry, tmp_path, verify=verify).state == "absent"
    put("c")
    assert status_of(entry, tmp_path, verify=verify) == ("toy", "incomplete", "missing: a, b, d and 1 more")
    put(*"abde")
    detail = "6 files; checksums right" if verify else "6 files"
    assert status_of(entry, tmp_path, verify=verify) == ("toy", "complete", detail)


def test_an_absent_set_that_can_be_fetched_says_how(tmp_path):
    entry = toy_set(toy_file("a", urls=("https://somewhere/a",)))
    assert status_of(entry, tmp_path) == ("toy", "absent", "sinkformers data fetch toy")


def test_sizes_are_always_compared_and_content_on_request(tmp_path, put):
    entry = toy_set(toy_file("aa"), toy_file("bb"))
    put("aa", "bb")
    put("aa", content=b"xx")
    assert status_of(entry, tmp_path).state == "complete"
    assert status_of(entry, tmp_path, verify=True) == ("toy", "corrupt", "aa has the wrong checksum")
    put("bb", content=b"longer")
    assert status_of(entry, tmp_path) == ("toy", "corrupt", "bb has 6 bytes instead of 2")


def test_other_versions_are_complete_and_reported(tmp_path, put):
    entry = toy_set(toy_file("aa", varies=True), toy_file("bb", alternatives=("toy/other/bb",)), toy_file("cc"))
    put("aa", "other/bb", "cc", content=b"??")
    put("cc")
    assert status_of(entry, tmp_path) == ("toy", "complete", "3 files; your own version of bb")
    assert status_of(entry, tmp_path, verify=True) == ("toy", "complete", "3 files; your own version of aa, bb")


def test_one_file_is_named(tmp_path, put):
    put("a")
    assert status_of(toy_set(toy_file("a")), tmp_path).detail == "a"


def test_embedded_sets_need_their_library(tmp_path, monkeypatch):
    assert status_of(CATALOGUE["digits"], tmp_path) == ("digits", "embedded", "in scikit-learn")

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", not_installed)
    status = status_of(CATALOGUE["digits"], tmp_path)
    assert "needs scikit-learn; install it with pip install '.[experiments]' in your clone" in status.detail


def pets(folder, names):
    (folder / "dogs-vs-cats").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "dogs-vs-cats" / "train.zip", "w") as archive:
        for name in names:
            archive.writestr(f"train/{name}", b"")


def test_photographs_are_counted(tmp_path):
    pets(tmp_path, [f"cat.{n}.jpg" for n in range(1234)] + [f"dog.{n}.jpg" for n in range(2)])
    detail = "1,234 cats and 2 dogs; your own version of train.zip"
    assert status_of(CATALOGUE["dogs-vs-cats"], tmp_path) == ("dogs-vs-cats", "complete", detail)


def test_an_archive_replaces_all_files(tmp_path):
    archive = tmp_path / "modelnet40" / "modelnet40_ply_hdf5_2048.zip"
    archive.parent.mkdir()
    archive.touch()
    detail = f"{archive.name}; your own version of {archive.name}"
    assert status_of(CATALOGUE["modelnet40"], tmp_path) == ("modelnet40", "complete", detail)


def test_an_archive_with_other_contents_is_corrupt(tmp_path):
    pets(tmp_path, ["horse.0.jpg"])
    name, state, detail = status_of(CATALOGUE["dogs-vs-cats"], tmp_path)
    assert (name, state) == ("dogs-vs-cats", "corrupt")
    assert "contains 0 files named cat.N.jpg and 0 named dog.N.jpg" in detail


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_real_data_is_complete(real_data, name):
    status = status_of(CATALOGUE[name], real_data, verify=True)
    assert status.state == ("embedded" if name == "digits" else "complete")
    assert name == "digits" or status.detail.endswith("; checksums right")
