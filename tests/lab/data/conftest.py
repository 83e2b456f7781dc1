"""The real data sets, if they are available, and a cache for each test."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[4] / "shared" / "data"
REAL = Path(os.environ.get("SINKFORMERS_DATA") or BESIDE)


@pytest.fixture
def real_data():
    if not REAL.is_dir():
        pytest.skip(f"real data is in neither $SINKFORMERS_DATA nor {BESIDE}")
    return REAL


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("SINKFORMERS_DATA", raising=False)
    return folder / "sinkformers"


@pytest.fixture
def read_only():
    """Remove the write permission of a folder until the end of the test."""
    folders = []

    def protect(folder):
        folder.chmod(0o555)
        folders.append(folder)

    yield protect
    for folder in folders:
        folder.chmod(0o755)
