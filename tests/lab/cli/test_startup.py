"""Help, the list, and refusals that need no model, device or data import no heavy library, and so answer at once."""

import os
import subprocess
import sys

import pytest

from tests.lab.fake_runs import write_run

HEAVY = {"torch", "numpy", "matplotlib", "transformers", "accelerate", "sklearn", "PIL"}


def run_and_list_imports(arguments, folder):
    """Run the console script in a new process in `folder`; return its exit code, its stderr and the heavy imports."""
    code = f"""
import sys
sys.argv = ["sinkformers", *{arguments!r}]
from sinkformers.lab.cli import main
try:
    main()
except SystemExit as done:
    print("\\nexit", done.code or 0, *sorted({HEAVY!r} & set(sys.modules)))
"""
    environment = {name: value for name, value in os.environ.items() if name != "SINKFORMERS_DATA"}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    _, code, *heavy = done.stdout.splitlines()[-1].split()
    return int(code), done.stderr, heavy


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "run --help",
        "figure --help",
        "figure attention --help",
        "data --help",
        "data fetch --help",
        "doctor --help",
        "list",
        "list --json",
        "data status",
    ],
)
def test_answers_without_heavy_imports(arguments, tmp_path):
    assert run_and_list_imports(arguments.split(), tmp_path) == (0, "", [])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("rnu figure6", "No such command 'rnu'"),
        ("run figure7", "there is no artefact 'figure7'"),
        ("run figure6 --preset huge", "has no preset 'huge'"),
        ("run figure6 --seeds x", "--seeds must be whole numbers"),
        ("run figure6 --n-iters 0", "--n-iters must be whole numbers"),
        ("run figure6 --arms y", "--arms y"),
        ("run figure6 --device tpu", "--device"),
        ("run figure6 --data absent", "the data folder absent (--data) does not exist"),
        ("run figure6 --preset smoke --out file", "Choose another --out"),
        ("run figure1 --out file", "Choose another --out"),
        ("run theory --out file", "Choose another --out"),
        ("report absent", "absent does not exist"),
        ("report empty", "no finished run"),
        ("predict empty", "no finished run"),
        ("predict images", "there is nothing to predict"),
        ("predict shapes", "there is nothing to predict"),
        ("predict shapes chair.stl", "must be one of .off"),
        ("predict shapes chair.off", "chair.off cannot be read"),
        ("predict shapes --file file", "--file is for texts"),
        ("predict reviews --point 3", "--point is for shapes"),
        ("predict reviews a --file file", "not both"),
        ("predict reviews --layer x a", "add --draw"),
        ("predict reviews --file absent", "absent cannot be read"),
        ("data fetch minst", "did you mean mnist?"),
        ("data fetch imdb", "imdb cannot be downloaded automatically"),
        ("data status --data absent", "the data folder absent (--data) does not exist"),
        ("figure attention --out picture.docx", "must end in .png"),
        ("figure flow --out empty", "is a folder"),
    ],
)
def test_refusals_without_heavy_imports(arguments, reason, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for folder, artefact in (("images", "figure6"), ("shapes", "table1-set"), ("reviews", "figure4")):
        if folder in arguments:
            write_run(tmp_path / folder, artefact=artefact, preset="smoke", metrics={"config": {"recipe": {}}})
    code, complaint, heavy = run_and_list_imports(arguments.split(), tmp_path)
    assert (code, heavy) == (2, [])
    assert reason in complaint


def test_the_heavy_imports_of_a_command_are_found(tmp_path):
    code, _, heavy = run_and_list_imports(["figure", "attention", "--out", "picture.png"], tmp_path)
    assert code == 0
    assert {"torch", "matplotlib"} <= set(heavy)
