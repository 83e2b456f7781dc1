"""Each package imports only packages below it, lazy and string imports included; the lab uses public names only."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import sinkformers

PACKAGE = Path(sinkformers.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Low to high: what a package may import beside itself. "public" is the top level, `from sinkformers import …`.
MAY_IMPORT = {
    "kernels": set(),
    "core": {"kernels"},
    "distributed": set(),
    "attention": {"core", "distributed", "kernels"},
    "flows": {"core"},
    "modules": {"core", "distributed", "attention", "flows"},
    "conversion": {"core", "distributed", "modules", "attention"},
    "models": {"distributed", "attention", "modules"},
    "doctor": {"core", "attention"},
    "viewing": {"core", "modules", "conversion"},
    "public": {"core", "distributed", "attention", "flows", "modules", "conversion", "models", "viewing"},
    "lab": {
        "public",
        "core",
        "distributed",
        "attention",
        "doctor",
        "flows",
        "modules",
        "conversion",
        "models",
        "viewing",
    },
    "moved": {"public", "lab"},
}
# Old import paths, which warn and look names up in the lab.
MOVED = {"cli.py", "data.py", "experiments.py"}
# Names that the lab uses although no `__init__` exports them.
PRIVATE_NAMES_IN_THE_LAB = {
    "sinkformers.models.encoder.Encoder",
    "sinkformers.models.set_transformer.unscaled_plan",
    "sinkformers.modules.neighbours.Neighbourhoods",
    "sinkformers.modules.neighbours.neighbourhoods",
    "sinkformers.modules.neighbours.take_points",
}


def targets_of(source: str, package: str) -> set[str]:
    """Return the dotted names of ours that `source`, a module of the dotted `package`, imports.

    Imports count at the top or inside a function, absolute or relative, as a statement or as the string that an import
    by name is given.
    """
    targets = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets |= {f"{base}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"sinkformers(\.\w+)+", node.value)
        ):
            targets.add(node.value)
    return {target for target in targets if target.split(".")[0] == "sinkformers"} - {"sinkformers.__version__"}


def packages_imported(source: str, package: str) -> set[str]:
    """Return the packages of the table that `source`, a module of the dotted `package`, imports."""
    parts = [target.split(".") for target in targets_of(source, package)]
    return {part[1] if len(part) > 1 and part[1] in MAY_IMPORT else "public" for part in parts}


def package_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    if len(parts) > 1:
        return parts[0]
    return "moved" if file.name in MOVED else "public"


def dotted_package(file: Path) -> str:
    return ".".join(["sinkformers", *file.relative_to(PACKAGE).parts[:-1]])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file):
    package = package_of(file)
    imported = packages_imported(file.read_text(encoding="utf-8"), dotted_package(file))
    forbidden = imported - MAY_IMPORT[package] - {package}
    assert not forbidden, f"{file.name} is in {package}, which may not import {sorted(forbidden)}"


def is_public(target: str) -> bool:
    """Whether a dotted name of the library is a public package, or exported by one."""
    if target == "sinkformers" or target.removeprefix("sinkformers.") in MAY_IMPORT:
        return True
    package, _, name = target.rpartition(".")
    public = package == "sinkformers" or package.removeprefix("sinkformers.") in MAY_IMPORT
    return public and name in import_module(package).__all__


def test_the_lab_uses_public_names_only():
    private = set()
    for file in (PACKAGE / "lab").rglob("*.py"):
        targets = targets_of(file.read_text(encoding="utf-8"), dotted_package(file))
        private |= {target for target in targets if not target.startswith("sinkformers.lab") and not is_public(target)}
    assert private == PRIVATE_NAMES_IN_THE_LAB


@pytest.mark.parametrize(
    ("target", "public"),
    [
        ("sinkformers", True),
        ("sinkformers.sinkhorn", True),
        ("sinkformers.models", True),
        ("sinkformers.models.ViT", True),
        ("sinkformers.models.vit", False),
        ("sinkformers.models.vit.ViT", False),
        ("sinkformers.hidden", False),
    ],
)
def test_public_names_are_those_of_the_packages(target, public):
    assert is_public(target) is public


def test_every_package_is_in_the_table():
    on_disk = {file.relative_to(PACKAGE).parts[0] for file in FILES if len(file.relative_to(PACKAGE).parts) > 1}
    assert on_disk == set(MAY_IMPORT) - {"public", "moved"}


def test_kernels_are_imported_by_backends_alone():
    """And inside functions, so that they are loaded when a call needs them."""
    reaching = set()
    for file in FILES:
        source = file.read_text(encoding="utf-8")
        if package_of(file) == "kernels" or "kernels" not in packages_imported(source, dotted_package(file)):
            continue
        reaching.add(str(file.relative_to(PACKAGE)))
        at_the_top = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "kernels" not in packages_imported(ast.unparse(ast.Module(at_the_top, [])), dotted_package(file)), file
    backends = {f"{package}/backends/{name}.py" for package in ("core", "attention") for name in ("native", "triton")}
    places = ("limit/backends/native", "causal/backends/native", "causal/backends/triton")
    others = {f"attention/{place}.py" for place in places}
    assert reaching == {"core/backend.py", *others, *backends}


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import sinkformers.kernels.native", {"kernels"}),
        ("from sinkformers.kernels import native", {"kernels"}),
        ("from sinkformers import kernels, sinkhorn", {"kernels", "public"}),
        ("from ..lab import cli", {"lab"}),
        ("from .. import models", {"models"}),
        ("from .problem import Problem", {"core"}),
        ("def late():\n    from sinkformers.lab.artefacts import figure1", {"lab"}),
        ("importlib.import_module('sinkformers.lab.data.sets.digits')", {"lab"}),
        ("from sinkformers import __version__", set()),
        ("import torch, numpy.linalg", set()),
        ("'sinkformers.core is a package, but this is a sentence'", set()),
    ],
)
def test_every_kind_of_import_is_found(source, packages):
    assert packages_imported(source, "sinkformers.core") == packages


def test_the_table_has_no_cycle():
    lower: set[str] = set()
    remaining = dict(MAY_IMPORT)
    while remaining:
        ready = {package for package, below in remaining.items() if below <= lower}
        assert ready, f"these packages import each other: {sorted(remaining)}"
        lower |= ready
        remaining = {package: below for package, below in remaining.items() if package not in ready}
