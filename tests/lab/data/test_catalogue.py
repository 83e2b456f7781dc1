"""The catalogue is complete enough to act on, and agrees with the files that it describes."""

import re

import pytest

from sinkformers.lab.data import CATALOGUE, DataError, find_data_set

FILES = [file for entry in CATALOGUE.values() for file in entry.files]


def test_the_sets():
    assert list(CATALOGUE) == ["mnist", "digits", "dogs-vs-cats", "modelnet40", "imdb", "iwslt14", "multi30k"]
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
    assert not any("{" in place for place in file.elsewhere)


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_a_set_says_what_it_is_and_how_to_get_it(entry):
    assert entry.title
    assert entry.licence
    if entry.files:
        assert re.search(f"(put|unpack) .* {entry.name}/\\S*$|put .* into {entry.name}/$", entry.by_hand)


def test_every_checksum_belongs_to_one_set():
    assert len({file.path for file in FILES}) == len(FILES) == 42


def test_a_name_that_is_not_there():
    with pytest.raises(DataError, match=r"no data set 'mnits'; did you mean mnist\? there are mnist, digits, dogs-vs-"):
        find_data_set("mnits")
    with pytest.raises(DataError, match=r"no data set 'xyz'; there are mnist, digits, .*, multi30k\.$"):
        find_data_set("xyz")


def test_the_real_files_are_the_ones_described(real_data):
    sums = dict(reversed(line.split()) for line in (real_data / "SHA256SUMS").read_text().splitlines())
    assert {file.path: file.sha256 for file in FILES} == sums
    assert {file.path: file.size for file in FILES} == {path: (real_data / path).stat().st_size for path in sums}
