"""Every public name has an example, and every example of a docstring runs and prints what it shows."""

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

PAGES = Path(__file__).parent.parent / "docs" / "api"
# What is public, and the page that describes it; each page's own blocks of Python are executed by tests/test_readme.py.
PACKAGES = {
    "sinkformers": ("core", "attention", "modules", "conversion"),
    "sinkformers.models": ("models",),
    "sinkformers.modules": ("modules",),
    "sinkformers.flows": ("flows",),
}
NAMES = [
    pytest.param(package, name, id=f"{package}.{name}")
    for package in PACKAGES
    for name in import_module(package).__all__
    if name != "__version__"
]


def pages(package):
    return "\n".join((PAGES / f"{page}.md").read_text(encoding="utf-8") for page in PACKAGES[package])


def public(package, name):
    return getattr(import_module(package), name)


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_every_public_name_has_an_example(package, name):
    text = pages(package) if package != "sinkformers" else "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    in_page = any(re.search(rf"\b{name}\b", block) for block in blocks)
    in_docstring = ">>>" in (inspect.getdoc(public(package, name)) or "")
    assert in_page or in_docstring, f"{package}.{name}: write an example into its docstring, or a block on its page"


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_the_examples_of_its_docstring_run(package, name):
    thing = public(package, name)
    if not inspect.getdoc(thing) or not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return  # a value, which has no docstring of its own
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    torch.manual_seed(0)
    said = []
    for test in finder.find(thing, name, globs={"__name__": "__main__"}):
        runner.run(test, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)
