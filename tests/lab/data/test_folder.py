"""Which data folder is used, and whether it is writable."""

from pathlib import Path

import pytest

from sinkformers.lab.data import DataError, data_folder
from sinkformers.lab.data.store.folder import is_writable, user_cache


def test_the_argument_precedes_the_variable_and_the_variable_the_cache(tmp_path, monkeypatch, cache):
    given, variable = tmp_path / "given", tmp_path / "variable"
    given.mkdir()
    variable.mkdir()
    assert data_folder() == cache / "data"
    monkeypatch.setenv("SINKFORMERS_DATA", str(variable))
    assert data_folder() == variable
    assert data_folder(given) == given
    monkeypatch.setenv("SINKFORMERS_DATA", "")
    assert data_folder(None) == cache / "data"


@pytest.mark.parametrize("value", [None, "", "relative/path"])
def test_the_cache_is_in_the_home_if_xdg_gives_no_absolute_path(monkeypatch, value):
    monkeypatch.setenv("HOME", "/somebody")
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert user_cache() == Path("/somebody/.cache/sinkformers")


@pytest.mark.parametrize("origin", ["--data", "SINKFORMERS_DATA"])
def test_a_named_folder_must_be_a_folder(tmp_path, monkeypatch, origin):
    def named(path):
        monkeypatch.setenv("SINKFORMERS_DATA", str(path))
        return data_folder(path if origin == "--data" else None)

    with pytest.raises(DataError, match=f"gone \\({origin}\\) does not exist; make it, or leave out {origin}"):
        named(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=f"file \\({origin}\\) is a file; name the folder"):
        named(tmp_path / "file")


def test_write_permission_counts_for_root_too(tmp_path, read_only):
    assert is_writable(tmp_path)
    assert is_writable(tmp_path / "not" / "yet")
    read_only(tmp_path)
    assert not is_writable(tmp_path)
    assert not is_writable(tmp_path / "not" / "yet")


def test_nothing_below_a_file_is_writable(tmp_path):
    (tmp_path / "file").touch()
    assert not is_writable(tmp_path / "file" / "folder")
