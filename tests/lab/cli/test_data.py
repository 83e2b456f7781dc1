"""`sinkformers data`: one line per set, and errors in one sentence."""

import hashlib

import pytest
from typer.testing import CliRunner

from sinkformers.lab.cli.app import app
from sinkformers.lab.data import CATALOGUE, DataFile, DataSet


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SINKFORMERS_DATA", raising=False)


def invoke(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def refusal(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("sinkformers: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_the_command_without_arguments_prints_its_help():
    assert invoke().output.strip() == invoke("--help").output.strip()


def test_status_begins_each_line_with_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    result = invoke("status", "--data", tmp_path)
    assert result.exit_code == 0, result.output
    heading, blank, *lines = result.output.splitlines()
    assert (heading, blank) == (f"In {tmp_path}", "")
    assert [line.split()[0] for line in lines] == list(CATALOGUE)
    states = {line.split()[0]: line.split()[1] for line in lines}
    assert states.pop("digits") == "embedded"
    assert set(states.values()) == {"absent"}
    assert "mnist         absent      sinkformers data fetch mnist" in lines


def test_status_verifies_on_request(tmp_path):
    file = CATALOGUE["imdb"].files[0]
    path = tmp_path / file.path
    path.parent.mkdir()
    with path.open("wb") as sparse:
        sparse.truncate(file.size)
    result = invoke("status", "--data", tmp_path)
    assert (result.exit_code, "\nimdb          complete " in result.output) == (0, True)
    result = invoke("status", "--data", tmp_path, "--verify")
    assert result.exit_code == 1
    assert f"\nimdb          corrupt     {file.name} has the wrong checksum\n" in result.output


def test_status_uses_the_cache_by_default(tmp_path):
    assert invoke("status").output.startswith(f"In {tmp_path / 'cache' / 'sinkformers' / 'data'}\n")


def test_a_missing_folder_is_refused(tmp_path):
    for arguments in (["status"], ["fetch", "mnist"]):
        assert "gone (--data) does not exist" in refusal(*arguments, "--data", tmp_path / "gone")


def test_an_unknown_set_is_refused(tmp_path):
    assert "no data set 'minst'; did you mean mnist?" in refusal("fetch", "minst", "--data", tmp_path)


@pytest.mark.parametrize("name", ["dogs-vs-cats", "modelnet40", "imdb", "iwslt14"])
def test_a_set_that_cannot_be_downloaded_says_how_to_get_it(tmp_path, name):
    sentence = refusal("fetch", name, "--data", tmp_path)
    assert (
        f"{name} cannot be downloaded automatically: {CATALOGUE[name].by_hand} of the data folder, {tmp_path}."
        in sentence
    )
    assert not list(tmp_path.iterdir())


def test_an_embedded_set_has_nothing_to_fetch(tmp_path):
    result = invoke("fetch", "digits", "--data", tmp_path)
    assert (result.exit_code, result.output) == (0, "digits comes with scikit-learn; there is nothing to fetch\n")


def test_fetch_prints_each_file_and_then_that_all_are_complete(tmp_path, monkeypatch):
    served, content = tmp_path / "served.bin", b"x" * 12_345
    served.write_bytes(content)
    file = DataFile("toy/served.bin", len(content), hashlib.sha256(content).hexdigest(), (served.as_uri(),))
    monkeypatch.setitem(CATALOGUE, "toy", DataSet("toy", "A toy", "none", files=(file,)))
    (tmp_path / "data").mkdir()
    result = invoke("fetch", "toy", "--data", tmp_path / "data")
    assert result.output == f"served.bin: 12,345 bytes\nFetched 1 files of toy to {tmp_path / 'data'}\n"
    assert (tmp_path / "data" / "toy" / "served.bin").read_bytes() == content
    result = invoke("fetch", "toy", "--data", tmp_path / "data")
    assert (result.exit_code, result.output) == (0, f"toy is complete in {tmp_path / 'data'}\n")
