"""The catalogue: made of the modules in `sets`, complete, and in agreement with the real files."""

import hashlib
import re
import sys

import pytest

from sinkformers.lab.data import CATALOGUE, DataError, fetch, find_data_set, sets, status_of
from sinkformers.lab.data.store import catalogue

FILES = [file for entry in CATALOGUE.values() for file in entry.files]


def test_the_sets():
    assert list(CATALOGUE) == ["digits", "dogs-vs-cats", "imdb", "iwslt14", "mnist", "modelnet40", "multi30k"]
    assert [name for name, entry in CATALOGUE.items() if not entry.files] == ["digits"]
    assert [name for name, entry in CATALOGUE.items() if entry.files and all(file.urls for file in entry.files)] == [
        "mnist",
        "multi30k",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path)
def test_a_file_can_be_verified_and_is_fetched_over_https_only(file):
    assert re.fullmatch("[0-9a-f]{64}", file.sha256)
    assert file.size > 0
    assert file.path.split("/")[0] in CATALOGUE
    for url in file.urls:
        assert url.startswith("https://")
        assert url.endswith(f"/{file.name}")
        assert "{" not in url
    assert not any("{" in place for place in file.alternatives)


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_a_set_has_a_title_a_licence_and_a_source(entry):
    assert entry.title
    assert entry.licence
    if not entry.files:
        assert entry.library
    else:
        assert re.search(f"(put|unpack) .* {entry.name}/\\S*$|put .* into {entry.name}/$", entry.by_hand)


def test_every_path_belongs_to_one_set():
    assert len({file.path for file in FILES}) == len(FILES) == 42


def test_an_unknown_name_is_refused_with_a_suggestion():
    with pytest.raises(DataError, match=r"no data set 'mnits'; did you mean mnist\? there are digits, dogs-vs-cats, "):
        find_data_set("mnits")
    with pytest.raises(DataError, match=r"no data set 'xyz'; there are digits, .*, multi30k\.$"):
        find_data_set("xyz")


def test_the_real_files_are_the_ones_described(real_data):
    sums = dict(reversed(line.split()) for line in (real_data / "SHA256SUMS").read_text().splitlines())
    assert {file.path: file.sha256 for file in FILES} == sums
    assert {file.path: file.size for file in FILES} == {path: (real_data / path).stat().st_size for path in sums}


TOY = '''
from sinkformers.lab.data.store.data_set import DataSet, list_files
from sinkformers.lab.data.store.folder import AnyPath, path_of

CHECKSUMS = """
{sha256} 7 toy.txt
"""
DATA_SET = DataSet(
    "toy",
    title="A toy",
    licence="none",
    by_hand="write it and put it into toy/",
    files=list_files("toy", CHECKSUMS, urls=("{source}/{{name}}",)),
    describe=lambda folder, places: f"{{places[0].read_text()}}",
)


def load_toy(folder: AnyPath) -> str:
    return (path_of("load_toy", "folder", folder) / DATA_SET.files[0].path).read_text()
'''


def test_one_new_file_adds_a_data_set(tmp_path, monkeypatch):
    module, source, folder = (tmp_path / name for name in ("sets", "source", "data"))
    for place in (module, source, folder):
        place.mkdir()
    (source / "toy.txt").write_text("content")
    sha256 = hashlib.sha256(b"content").hexdigest()
    (module / "toy.py").write_text(TOY.format(sha256=sha256, source=source.as_uri()))
    monkeypatch.setattr(sets, "__path__", [*sets.__path__, str(module)])
    monkeypatch.setattr(catalogue, "CATALOGUE", catalogue.discover())
    try:
        assert list(catalogue.CATALOGUE) == sorted([*CATALOGUE, "toy"])
        entry = find_data_set("toy")
        assert status_of(entry, folder).state == "absent"
        assert fetch("toy", folder) == [folder / "toy" / "toy.txt"]
        assert status_of(entry, folder, verify=True) == ("toy", "complete", "content; checksums right")
        assert sets.toy.load_toy(folder) == "content"
    finally:
        sys.modules.pop(f"{sets.__name__}.toy", None)
