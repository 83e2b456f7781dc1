"""`sinkformers report`: tables in the terminal, a page on disk, and errors in one sentence."""

import math
import sys

import pytest
from typer.testing import CliRunner

from sinkformers.lab.cli.app import app
from tests.lab.fake_runs import epoch, write_run, write_unfinished

SINKHORN = ["Sinkhorn,", "n_iters", "=", "3"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def refused(result):
    """Return the sentence of a refusal."""
    assert result.exit_code == 2
    assert result.stderr.startswith("sinkformers: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def runs(tmp_path):
    for n_iters, finals in ((1, (0.5, 0.9, 0.6)), (3, (0.7, 0.8, 0.75))):
        for seed, final in enumerate(finals):
            write_run(tmp_path / "runs", artefact="unheard-of", n_iters=n_iters, seed=seed, final=final)
    return tmp_path / "runs"


def test_a_report_prints_its_tables_and_writes_its_page(runs):
    write_unfinished(runs, artefact="unheard-of", arm="n-3", seed=5)
    result = invoke(runs)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0] == "unheard-of, small"
    rows = [line.split() for line in result.output.splitlines()]
    assert ["SoftMax", "3", "60.00%", "66.67%", "90.00%", "50.00%"] in rows
    assert [*SINKHORN, "3", "75.00%", "75.00%", "80.00%", "70.00%"] in rows
    assert ["SoftMax", "50.00%", "90.00%", "60.00%", "–"] in rows
    assert "n-3 seed 5 (3 epochs done)" in result.output
    page = runs / "report" / "index.html"
    assert page.exists()
    assert result.output.splitlines()[-1] == f"Written to {page}"


def test_several_folders_give_one_report_in_out(runs, tmp_path):
    write_run(tmp_path / "more", artefact="unheard-of", seed=3, final=0.4)
    result = invoke(runs, tmp_path / "more", "--out", tmp_path / "not" / "yet")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["SoftMax", "4", "55.00%", "60.00%", "90.00%", "40.00%"] in rows
    assert (tmp_path / "not" / "yet" / "report" / "index.html").exists()
    assert not (runs / "report").exists()


def test_diverged_losses_are_the_worst(tmp_path):
    for seed, loss in enumerate((0.5, math.inf, None)):
        test = {"loss": loss, "accuracy": 0.5}
        epochs = [epoch(0, 0.1), {"epoch": 1, "train": {"loss": loss}, "test": test}]
        write_run(tmp_path, artefact="unheard-of", seed=seed, epochs=epochs, metrics={"metric": "loss"})
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    assert ["SoftMax", "3", "diverged", "diverged", "0.5", "diverged"] in [
        line.split() for line in result.output.splitlines()
    ]


def test_markup_in_names_is_printed_unchanged(tmp_path):
    for arm in ("[red]b[", "[red]c["):  # with equal settings, so that their names are needed
        write_run(tmp_path, artefact="[bold]a[", arm=arm)
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    assert "[bold]a[" in result.output
    assert "[red]b[" in result.output


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    assert "nowhere does not exist" in refused(invoke(tmp_path / "nowhere"))


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    assert "contains no finished run, and none is running" in refused(invoke(tmp_path))
    write_unfinished(tmp_path)
    assert "contains no finished run, one is unfinished" in refused(invoke(tmp_path))


def test_a_damaged_run_is_named(runs):
    file = next(runs.rglob("metrics.json"))
    file.write_text('{"artefact": ', encoding="utf-8")
    assert str(file) in refused(invoke(runs))


def test_an_unwritable_out_is_refused(runs, tmp_path):
    (tmp_path / "file").touch()
    sentence = refused(invoke(runs, "--out", tmp_path / "file"))
    assert f"cannot write {tmp_path / 'file'}" in sentence
    assert "choose another file or folder" in sentence


@pytest.mark.parametrize("name", ["matplotlib", "jinja2"])
def test_a_missing_library_is_refused_with_the_fix(runs, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert refused(invoke(runs)) == (
        f"sinkformers: reports need {name}; install it with pip install '.[cli]' in your clone.\n"
    )


def test_a_page_is_filled_from_the_records(runs, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: unheard-of small runs -->\nold\n<!-- end -->\nafter\n")
    assert invoke(runs, "--fill", page).exit_code == 0
    first = page.read_text()
    assert first.startswith("before\n<!-- results: unheard-of small runs -->\n\n| model | seed 0 | seed 1 | seed 2 |\n")
    assert "| Sinkhorn, n_iters = 3 | 70.00% | 80.00% | 75.00% |\n\n<!-- end -->\nafter\n" in first
    assert "old" not in first
    assert invoke(runs, "--fill", page).exit_code == 0
    assert page.read_text() == first


def test_a_page_that_cannot_be_filled_is_not_changed(runs, tmp_path):
    page = tmp_path / "page.md"
    for text, sentence in (
        ("nothing", "the page has no place to fill"),
        (
            "<!-- results: figure6 small runs -->\nold\n<!-- end -->",
            "asks for figure6, small, and no run of it is there",
        ),
        ("<!-- results: unheard-of small odd -->\n<!-- end -->", "asks for the part 'odd' of unheard-of"),
    ):
        page.write_text(text)
        assert sentence in refused(invoke(runs, "--fill", page))
        assert page.read_text() == text
    assert "cannot write" in refused(invoke(runs, "--fill", tmp_path / "no.md"))
