"""IMDb: both archives and the folder give the same reviews, and damage is reported."""

import io
import tarfile

import pytest

from sinkformers.lab.data import DataError, load_imdb
from sinkformers.lab.data.sets import imdb
from sinkformers.lab.data.store.catalogue import find_data_set
from sinkformers.lab.data.store.status import status_of

PER_CLASS = 3


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(imdb, "PER_CLASS", PER_CLASS)


def toy_files():
    """Return files named like Stanford's, with numbers out of order, and files that must be ignored."""
    files = {
        f"aclImdb/{part}/{name}/{number}_{rating}.txt": f"{part} {name} {number}: schön<br />".encode()
        for part in ("train", "test")
        for name, rating in (("pos", 10), ("neg", 1))
        for number in (10, 2, 0)
    }
    return files | {"aclImdb/train/unsup/0_0.txt": b"?", "aclImdb/README": b"?", "aclImdb/train/neg/urls.txt": b"?"}


def write(folder, files, kind="xz"):
    place = folder / "imdb"
    place.mkdir(exist_ok=True)
    if kind == "folder":
        for name, content in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        return place / "aclImdb"
    archive = place / {"xz": "aclImdb_labeled.tar.xz", "gz": "aclImdb_v1.tar.gz"}[kind]
    with tarfile.open(archive, f"w:{kind}") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive


@pytest.mark.parametrize("kind", ["xz", "gz", "folder"])
def test_every_layout_gives_the_same_reviews_in_the_same_order(tmp_path, kind):
    write(tmp_path, toy_files(), kind)
    found = load_imdb(tmp_path)
    assert (found.name, found.classes) == ("imdb", ("neg", "pos"))
    for part in ("train", "test"):
        texts, labels = getattr(found, part)
        assert texts == [f"{part} {name} {number}: schön<br />" for name in ("neg", "pos") for number in (0, 2, 10)]
        assert labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_missing_set_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"neither an archive nor aclImdb in .*imdb; get aclImdb_v1\.tar\.gz from http"):
        load_imdb(tmp_path)


@pytest.mark.parametrize("kind", ["xz", "folder"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aclImdb/test/pos/2_10.txt": None}, "2 reviews in test/pos, 2 of them different, instead of 3"),
        ({"aclImdb/train/neg/7_1.txt": b""}, "4 reviews in train/neg, 4 of them different, instead of 3"),
        ({"aclImdb/test/pos/2_10.txt": None, "aclImdb/test/pos/0_9.txt": b""}, "3 reviews in test/pos, 2 of them"),
        ({"aclImdb/test/pos/0_9.txt": b""}, "4 reviews in test/pos, 3 of them different"),
        ({"aclImdb/train/pos/0_10.txt": b"x" * (2**20 + 1)}, "is longer than 1,048,576 bytes, so it is not a review"),
    ],
)
def test_wrong_files_are_refused(tmp_path, kind, change, message):
    files = {name: content for name, content in (toy_files() | change).items() if content is not None}
    write(tmp_path, files, kind)
    with pytest.raises(DataError) as caught:
        load_imdb(tmp_path)
    assert message in str(caught.value)
    assert "get aclImdb_v1.tar.gz" in str(caught.value)


def test_a_review_that_is_not_utf8_is_named(tmp_path):
    write(tmp_path, toy_files() | {"aclImdb/train/pos/0_10.txt": b"\xff"})
    with pytest.raises(DataError, match=r"aclImdb/train/pos/0_10.txt in .*tar\.xz is not UTF-8; get"):
        load_imdb(tmp_path)


@pytest.mark.parametrize("kind", ["xz", "gz"])
@pytest.mark.parametrize("damage", [lambda all_: all_[: len(all_) // 2], lambda all_: b"<html>" + all_])
def test_a_damaged_archive_is_refused(tmp_path, kind, damage):
    archive = write(tmp_path, toy_files(), kind)
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(DataError, match=r"is damaged \(.+\); delete it and get aclImdb_v1") as caught:
        load_imdb(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_real_data(real_data, monkeypatch):
    monkeypatch.setattr(imdb, "PER_CLASS", 12_500)
    found = load_imdb(real_data)
    for texts, labels in (found.train, found.test):
        assert len(texts) == 25_000
        assert labels.bincount().tolist() == [12_500, 12_500]
    # The set is known to contain 49,582 different texts.
    assert len({*found.train.texts, *found.test.texts}) == 49_582
    words = sorted(len(text.split()) for text in found.train.texts)
    assert words[12_500] == 174


def test_status_counts_the_reviews_of_a_folder(tmp_path):
    source = write(tmp_path, toy_files(), "folder")
    entry = find_data_set("imdb")
    assert status_of(entry, tmp_path).state == "complete"
    (source / "test" / "pos" / "2_10.txt").unlink()
    status = status_of(entry, tmp_path)
    with pytest.raises(DataError) as refused:
        load_imdb(tmp_path)
    assert (status.state, status.detail) == ("corrupt", str(refused.value))
    assert status.detail.startswith(f"{source} contains 2 reviews in test/pos, ")
