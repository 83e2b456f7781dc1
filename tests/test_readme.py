"""What the README and the pages show is what the library does: every Python block runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks():
    blocks = []
    for page in PAGES:
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


def test_the_readme_has_an_example():
    assert any(parameter.values[0].name == "README.md" for parameter in python_blocks())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    lost = [link for link in links if not re.match(r"https?:", link) and not (page.parent / link).exists()]
    assert not lost
