"""The documentation holds every public name and every page."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import sinkformers

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
API = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
ENTRIES = re.findall(r"^::: (sinkformers(?:\.\w+)*)\.(\w+)$", API, flags=re.MULTILINE)
DOCUMENTED = {name for _, name in ENTRIES}


@pytest.mark.parametrize("name", sorted(set(sinkformers.__all__) - {"__version__"}))
def test_public_name_has_its_entry(name):
    assert name in DOCUMENTED
    assert getattr(sinkformers, name).__doc__


@pytest.mark.parametrize(("module", "name"), ENTRIES)
def test_every_entry_is_a_public_name(module, name):
    """Of the package, or of a package that is imported by its own name."""
    assert name in sinkformers.__all__ or name in import_module(module).__all__


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_the_map_of_packages_is_true():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    packages = set(re.findall(r"^\| `(\w+)/` \|[^|]*\|[^|]*\|$", page, flags=re.MULTILINE))
    package = Path(sinkformers.__file__).parent
    assert packages == {folder.name for folder in package.iterdir() if (folder / "__init__.py").is_file()}


@pytest.mark.skipif(
    not (ROOT / "results").is_dir(), reason="records are in the repository, not in the source distribution"
)
def test_the_results_on_the_page_are_those_of_the_records():
    """What `sinkformers report results --fill docs/reproduction.md` would write is what stands there."""
    from sinkformers.lab.artefacts import catalogue
    from sinkformers.lab.reporting import filling, records
    from sinkformers.lab.reporting.summary import summarise

    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    summaries = summarise(records.find([ROOT / "results"]), catalogue.find)
    assert filling.filled(page, summaries) == page
