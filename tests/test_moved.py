"""Import paths of the version before still work, and warn with the new path."""

import importlib
import os
import subprocess
import sys

import pytest

import sinkformers.lab.data


@pytest.mark.parametrize("name", sinkformers.lab.data.__all__)
def test_every_public_name_of_data_is_the_one_in_the_lab(name):
    old = importlib.import_module("sinkformers.data")
    new = f"sinkformers.lab.data.{name}"
    with pytest.warns(DeprecationWarning, match=rf"^sinkformers\.data\.{name} has moved to {new};"):
        found = getattr(old, name)
    assert found is getattr(sinkformers.lab.data, name)


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("catalogue", "sinkformers.lab.artefacts.catalogue"),
        ("figure1", "sinkformers.lab.artefacts.figure1"),
        ("translation", "sinkformers.lab.tasks.translation"),
        ("reporting", "sinkformers.lab.reporting"),
    ],
)
def test_modules_of_experiments_are_those_of_the_lab(name, new):
    old = importlib.import_module("sinkformers.experiments")
    with pytest.warns(DeprecationWarning, match=rf"^sinkformers\.experiments\.{name} has moved to {new};"):
        assert getattr(old, name) is importlib.import_module(new)


@pytest.mark.parametrize("module", ["data", "experiments"])
def test_unknown_names_raise_without_a_warning(module):
    old = importlib.import_module(f"sinkformers.{module}")
    with pytest.raises(AttributeError, match=rf"^module 'sinkformers\.{module}' has no attribute 'nonsense'$"):
        _ = old.nonsense


def test_the_command_runs_by_its_old_module_name():
    command = [sys.executable, "-W", "default", "-m", "sinkformers.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert result.returncode == 0
    assert result.stdout.startswith("sinkformers ")
    assert "sinkformers.cli has moved to sinkformers.lab.cli" in result.stderr


def test_the_warning_points_at_the_caller():
    with pytest.warns(DeprecationWarning, match="load_shapes") as caught:
        from sinkformers.data import load_shapes  # noqa: F401
    assert [warning.filename for warning in caught] == [__file__]
