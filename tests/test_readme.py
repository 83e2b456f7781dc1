"""What the README and the pages show is what the library does: every Python block runs as it stands."""

import re
import statistics
from pathlib import Path

import pytest
import torch

from sinkformers.lab.reporting.records import read, value

ROOT = Path(__file__).parent.parent
IN_REPOSITORY = pytest.mark.skipif(
    not (ROOT / "results").is_dir(), reason="records and pictures are in the repository, not in the source distribution"
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks():
    blocks = []
    for page in PAGES:
        if page.parent.name == "notebooks":  # one block goes on where another ends: tests/test_notebooks.py
            continue
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            line = text[: block.start()].count("\n") + 1
            blocks.append(pytest.param(page, line, block[1], id=f"{page.relative_to(ROOT)}:{line}"))
    return blocks


@pytest.mark.parametrize(("page", "line", "code"), python_blocks())
def test_block_runs(page, line, code):
    torch.manual_seed(0)
    # Blank lines before the code make a failure point at the line of the page.
    exec(compile("\n" * line + code, str(page), "exec"), {"__name__": "__main__"})


def raising_blocks():
    """Return the blocks of code that raise or warn, with the message that stands before each."""
    pattern = r"^```text\n([^`]*)^```\n\n^``` \{\.python \.raises\}\n(.*?)^```"
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = list(re.finditer(pattern, text, flags=re.DOTALL | re.MULTILINE))
        assert len(found) == text.count("``` {.python .raises}")
        for block in found:
            line = text[: block.start()].count("\n") + 1
            yield pytest.param(block[1].strip(), block[2], id=f"{page.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize(("message", "code"), list(raising_blocks()))
def test_block_raises_what_the_page_says(message, code):
    torch.manual_seed(0)
    shown = ".*".join(map(re.escape, message.split("…")))
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError, Warning), match=f"(?s)^{shown}"):
        exec(compile(code, "block", "exec"), {"__name__": "__main__"})


def printing_blocks():
    """Return the blocks of code of the guides that are followed by what they print."""
    for page in sorted((ROOT / "docs" / "guides").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        pattern = r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```"
        for block in re.finditer(pattern, text, flags=re.DOTALL | re.MULTILINE):
            line = text[: block.start()].count("\n") + 1
            yield pytest.param(block[1].rpartition("```python\n")[2], block[2], id=f"{page.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize(("code", "printed"), list(printing_blocks()))
def test_block_prints_what_the_page_says(code, printed, capsys):
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})
    # The smallest errors are rounding, which differs between processors.
    small = re.compile(r"\d\de-1[0-9]|\de-1[0-9]")
    assert small.sub("~", capsys.readouterr().out) == small.sub("~", printed)


def test_the_readme_has_an_example():
    assert any(parameter.values[0].name == "README.md" for parameter in python_blocks())


@IN_REPOSITORY
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"#]+)', text)
    lost = [link for link in links if not re.match(r"https?:", link) and not (page.parent / link).exists()]
    assert not lost


RESULTS = [  # the beginning of a row, its records, the n_iters in its columns, and the number of runs
    ("MNIST, one layer", "figure6/authors/patch-14-rate-0.002-n", (1, 5, "inf"), 3),
    ("the same, patch 7", "figure6/authors/patch-7-rate-0.002-n", (1, 5, "inf"), 3),
    ("the same, patch 4", "figure6/authors/patch-4-rate-0.002-n", (1, 5, "inf"), 3),
    ("patch 7 with mean pooling", "figure6/small/patch-7-rate-0.002-n", (1, 5), 3),
    ("Cats and dogs", "figure5/small/n", (1, 3, "inf"), 3),
    ("ModelNet40, Point Cloud", "table1-pct/small/n", (1, 3, "inf"), 3),
    ("ModelNet40, Set", "table1-set/small/n", (1, 21, "inf"), 3),
    ("IMDb", "figure4/small/n", (1, 3, "inf"), 3),
    ("Multi30k", "table2/small/continued-n", (1, 3), 2),
]


@IN_REPOSITORY
@pytest.mark.parametrize(("beginning", "where", "columns", "n_runs"), RESULTS)
def test_the_results_are_those_of_the_records(beginning, where, columns, n_runs):
    medians = []
    for n_iters in columns:
        runs = [read(file.parent) for file in (ROOT / "results").glob(f"{where}-{n_iters}/*/metrics.json")]
        assert len(runs) == n_runs
        median = statistics.median(value(run) for run in runs)
        medians.append(f"{median:.2f}" if runs[0].metrics["metric"] == "bleu" else f"{100 * median:.2f} %")
    row = re.search(rf"^\| {beginning}.*$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert row
    assert [cell.strip() for cell in row[0].split("|")][2 : 2 + len(columns)] == medians
