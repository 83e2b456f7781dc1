"""The Triton kernels' numbers, in a process of their own: `TRITON_INTERPRET` is read when a kernel is decorated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")


@pytest.mark.triton
@pytest.mark.parametrize("file", [f"test_triton_{which}interpreted.py" for which in ("", "causal_", "auto_", "costs_")])
def test_in_the_interpreter(file):
    """`TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_interpreted.py` shows every test by name."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).with_name(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
