"""Imports point down the house, lazily made ones included."""

import ast
import re
from pathlib import Path

import pytest

import sinkformers

PACKAGE = Path(sinkformers.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Low to high; what a room may import beside itself. "public" is the package's own surface, `from sinkformers import …`.
MAY_IMPORT = {
    "kernels": set(),
    "core": {"kernels"},
    "attention": {"core"},
    "flows": {"core"},
    "modules": {"core", "attention", "flows"},
    "conversion": {"core", "modules", "attention"},
    "models": {"modules"},
    "data": set(),
    "experiments": {"public", "core", "attention", "flows", "modules", "conversion", "models", "data"},
    "cli": {"experiments", "data", "models", "flows"},
    "public": {"core", "attention", "flows", "modules", "conversion", "models", "data"},
}


def rooms_imported(source: str, package: str) -> set[str]:
    """The rooms named by any import of `source`, a module of the dotted `package`: at the top or inside a function,
    absolute or relative, as a statement or as the string that an import by name is given."""
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
    targets.discard("sinkformers.__version__")
    ours = [target.split(".") for target in targets if target.split(".")[0] == "sinkformers"]
    return {parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "public" for parts in ours}


def room_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "public"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file):
    room = room_of(file)
    package = ".".join(["sinkformers", *file.relative_to(PACKAGE).parts[:-1]])
    forbidden = rooms_imported(file.read_text(encoding="utf-8"), package) - MAY_IMPORT[room] - {room}
    assert not forbidden, f"{file.name} lives in {room}, which may not import {sorted(forbidden)}"


def test_every_room_is_in_the_table_and_was_seen():
    on_disk = {folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    assert on_disk <= set(MAY_IMPORT)
    assert on_disk == {room_of(file) for file in FILES} - {"public"}
    assert {"core", "attention", "modules", "experiments", "cli"} <= on_disk


def test_kernels_are_reached_from_one_file_of_core():
    reaching = [
        file.name
        for file in FILES
        if room_of(file) == "core" and "kernels" in rooms_imported(file.read_text(encoding="utf-8"), "sinkformers.core")
    ]
    assert reaching in ([], ["backends.py"])


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("import sinkformers.kernels.native", {"kernels"}),
        ("from sinkformers.kernels import native", {"kernels"}),
        ("from sinkformers import kernels, sinkhorn", {"kernels", "public"}),
        ("from ..cli import main", {"cli"}),
        ("from .. import models", {"models"}),
        ("from .problem import Problem", {"core"}),
        ("def late():\n    from sinkformers.experiments import figure1", {"experiments"}),
        ("importlib.import_module('sinkformers.data.digits')", {"data"}),
        ("from sinkformers import __version__", set()),
        ("import torch, numpy.linalg", set()),
        ("'sinkformers.core is a room, but this is a sentence'", set()),
    ],
)
def test_the_reader_sees_every_kind_of_import(source, rooms):
    assert rooms_imported(source, "sinkformers.core") == rooms


def test_the_table_has_no_cycle():
    lower: set[str] = set()
    remaining = dict(MAY_IMPORT)
    while remaining:
        ready = {room for room, below in remaining.items() if below <= lower}
        assert ready, f"these rooms import each other: {sorted(remaining)}"
        lower |= ready
        remaining = {room: below for room, below in remaining.items() if room not in ready}
