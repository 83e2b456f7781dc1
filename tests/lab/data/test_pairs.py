"""Multi30k and IWSLT'14: the lines of the files are loaded, and damage is reported."""

import gzip

import pytest

from sinkformers.lab.data import DataError, load_iwslt14, load_multi30k
from sinkformers.lab.data.formats.lines import read_lines
from sinkformers.lab.data.sets import iwslt14, multi30k

SIZES = {"train": 7, "val": 2, "test_2016_flickr": 3, "test_2017_flickr": 5, "test_2017_mscoco": 1}


def lines(part, language, n):
    return [f"{language} {part} {k}: weiß" for k in range(n)]


@pytest.fixture
def flickr(tmp_path, monkeypatch):
    monkeypatch.setattr(multi30k, "PARTS", SIZES)
    folder = tmp_path / "multi30k" / "data" / "task1" / "raw"
    folder.mkdir(parents=True)
    for part, n in SIZES.items():
        for language in ("de", "en"):
            text = "\n".join(lines(part, language, n)) + "\n"
            (folder / f"{part}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.fixture
def talks(tmp_path, monkeypatch):
    monkeypatch.setattr(iwslt14, "TRAIN", 11)
    monkeypatch.setattr(iwslt14, "PARTS", {"valid": 3, "test": 2})
    folder = tmp_path / "iwslt14" / "iwslt14.tokenized.de-en"
    folder.mkdir(parents=True)
    for part, n in (("train", 11), ("valid", 3), ("test", 2)):
        for language in ("de", "en"):
            (folder / f"{part}.{language}").write_text("\n".join(lines(part, language, n)) + "\n", encoding="utf-8")
    return folder


@pytest.mark.usefixtures("flickr")
def test_multi30k_has_its_parts(tmp_path):
    found = load_multi30k(tmp_path)
    assert (found.name, found.source, found.target, found.note) == ("multi30k", "de", "en", "")
    assert list(found.tests) == ["test_2016_flickr", "test_2017_flickr", "test_2017_mscoco"]
    parts = {"train": found.train, "val": found.valid, **found.tests}
    for part, n in SIZES.items():
        assert parts[part] == (lines(part, "de", n), lines(part, "en", n))


def test_iwslt14_is_loaded_unchanged(talks, tmp_path):
    (talks / "test.de").write_text("ein ja@@ gu@@ ar\nund &quot;\n", encoding="utf-8")
    found = load_iwslt14(tmp_path)
    assert found.note == ""
    assert found.tests["test"].source == ["ein ja@@ gu@@ ar", "und &quot;"]
    assert found.train == (lines("train", "de", 11), lines("train", "en", 11))


def test_an_incomplete_training_part_is_accepted_and_noted(talks, tmp_path):
    for language in ("de", "en"):
        (talks / f"train.{language}").write_text("a\nb\n", encoding="utf-8")
    assert load_iwslt14(tmp_path).note == "2 of 11 training pairs"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("valid.de", "a\nb\n", r"valid\.de has 2 lines and valid\.en 3, and they should be translations of each other"),
        ("test.de", "a\n\n", r"test\.de is empty in line 2; delete it and run fairseq's"),
        ("test.en", b"\xff\n", r"test\.en is damaged \(.*utf-8.*\); delete it and run fairseq's"),
        ("train.en", None, r"iwslt14: there is no .*train\.en; run fairseq's examples.* of the data folder\.$"),
    ],
)
def test_wrong_files_of_iwslt14_are_refused(talks, tmp_path, name, content, message):
    if content is None:
        (talks / name).unlink()
    else:
        (talks / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load_iwslt14(tmp_path)


def test_a_short_test_set_is_refused(talks, tmp_path):
    for language in ("de", "en"):
        (talks / f"test.{language}").write_text("a\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"test\.de has 1 lines instead of the 2 of fairseq's script"):
        load_iwslt14(tmp_path)


def test_wrong_files_of_multi30k_are_refused(flickr, tmp_path):
    file = flickr / "val.en.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"val\.en\.gz is damaged \(.+\); delete it and run sinkformers data fetch mul"):
        load_multi30k(tmp_path)
    file.unlink()
    with pytest.raises(DataError, match=r"no multi30k/data/task1/raw/val\.en\.gz in .*; run sinkformers data fetch"):
        load_multi30k(tmp_path)
    for language in ("de", "en"):
        (flickr / f"val.{language}.gz").write_bytes(gzip.compress(b"a\n"))
    with pytest.raises(DataError, match=r"val\.de\.gz has 1 lines instead of 2; delete it and run"):
        load_multi30k(tmp_path)


def test_only_a_line_feed_ends_a_line(tmp_path):
    file = tmp_path / "odd.de"
    file.write_text(" a\u2028b \r\nc\x85d", encoding="utf-8", newline="")
    assert read_lines(file, "do something") == ["a\u2028b", "c\x85d"]


def test_the_real_data(real_data):
    flickr, talks = load_multi30k(real_data), load_iwslt14(real_data)
    # Counts as published.
    assert [sum(len(line.split()) for line in side) for side in flickr.train] == [322_383, 345_020]
    assert [sum(len(line.split()) + 1 for line in side) for side in talks.tests["test"]] == [161_838, 156_928]
    assert len(talks.valid.source) == 7_283
