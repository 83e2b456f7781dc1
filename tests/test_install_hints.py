"""Where a message or a page says how to install something, that works: the package is not on an index."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("src", "docs", "examples", "benchmarks", "README.md", "CONTRIBUTING.md")
INDEX = re.compile(r"pip install (?:-\S+ )*['\"]?sinkformers\b")
HINT = re.compile(r"pip install (?:-\S+ )*['\"]?\.\[([^\]]+)\]")


def texts():
    for place in PLACES:
        files = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*"))
        for file in files:
            if file.suffix in {".py", ".md"}:
                yield file, file.read_text(encoding="utf-8")


def test_nobody_is_sent_to_an_index():
    assert [str(file) for file, text in texts() if INDEX.search(text)] == []


def test_every_extra_that_is_named_exists():
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^([\w-]+) = \[", declared.partition("\n[")[0], re.MULTILINE))
    named = {extra for _, text in texts() for hint in HINT.findall(text) for extra in hint.split(",")}
    assert {"cli", "experiments", "triton"} <= named
    assert named - extras == {"{extra}"}  # filled in by its callers
