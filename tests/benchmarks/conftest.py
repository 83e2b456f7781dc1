"""Fixtures that several tests of the benchmarks share."""

import pytest

import sinkformers


@pytest.fixture
def limits(monkeypatch):
    """The workspace limits that were set, in turn; the first is the library's own."""
    seen = [123]
    monkeypatch.setattr(sinkformers, "workspace_limit", lambda: seen[-1], raising=False)
    monkeypatch.setattr(sinkformers, "set_workspace_limit", seen.append, raising=False)
    return seen
