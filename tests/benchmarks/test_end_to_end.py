"""The newer suites at small shapes, from the command to the page."""

import shutil

import pytest
import torch

from benchmarks import records
from benchmarks.case import Case
from benchmarks.command import ROOT, main
from benchmarks.settings import Settings
from benchmarks.steps import TorchStep
from benchmarks.suites import bias, half, limit, limit_entries, long, peak, small, threads
from tests.benchmarks.fake import Silent

SUITES = ("peak", "bias", "half", "threads", "long", "limit", "small")


@pytest.fixture
def small_shapes(monkeypatch):
    shape = Case(1, 2, 24, 8)
    monkeypatch.setattr(bias, "SHAPES", dict.fromkeys(bias.LABELS, shape))
    monkeypatch.setattr(half, "CASES", {"bfloat16": Case(1, 2, 24, 8, dtype="bfloat16")})
    monkeypatch.setattr(threads, "CASES", (shape,))
    monkeypatch.setattr(long, "N", 24)
    monkeypatch.setattr(small, "SHAPES", ((3, 4, 4), (1, 20, 4)))
    monkeypatch.setattr(peak, "N", 16)
    monkeypatch.setattr(limit, "SHAPES", dict.fromkeys(limit.LABELS, shape))
    monkeypatch.setattr(limit, "ROWS", ("sdpa", "torch"))
    monkeypatch.setattr(limit, "N", 24)
    monkeypatch.setattr(limit, "STDS", (1.0,))
    monkeypatch.setattr(limit, "SOLVER_STDS", {1.0: False, 2.0: True})
    monkeypatch.setattr(limit_entries, "BUDGETS", (2, 8, 32))


@pytest.fixture(autouse=True)
def number_of_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("small_shapes")
def test_a_run_fills_its_sections_of_the_page(tmp_path):
    folder, page = tmp_path / "records", tmp_path / "page.md"
    data = tmp_path / "no-data"
    data.mkdir()
    options = ["--budget", "1e-6", "--threads", "1", "--records", str(folder), "--data", str(data)]
    assert main([*SUITES, *options]) == 0
    found = records.newest(records.read(folder))
    assert set(found) == set(SUITES)
    assert {m.status for _, measured in found.values() for m in measured} <= {"timed", "measured", "left out"}
    assert all(any(m.seconds for m in measured) for _, measured in found.values())
    shutil.copy(ROOT / "docs" / "benchmarks.md", page)
    assert main(["report", "--records", str(folder), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert not [name for name in SUITES if f"Not recorded yet: `python -m benchmarks {name}`" in text]
    assert "Not recorded yet: `python -m benchmarks masks`" in text
    assert "![Column error against products](assets/benchmark-limit-products.png)" in text
    assert "no-data" not in next(run.command for run, _ in found.values())


def test_a_row_runs_on_its_own_threads_and_the_run_gets_its_own_back(monkeypatch):
    seen = []

    def compete(_suite, _shape, entries, *_rest):
        for entry in entries:
            step = entry.build()
            assert isinstance(step.step, TorchStep)
            step.reset()
            step.call()
            seen.append((entry.settings["variant"], torch.get_num_threads()))
        return []

    monkeypatch.setattr(threads, "compete", compete)
    monkeypatch.setattr(threads, "CASES", (Case(1, 1, 8, 4),))
    monkeypatch.setattr(threads, "ROWS", ("sdpa", "torch"))
    list(threads.run(Settings(threads=1), Silent()))
    assert seen == [("", 2), ("", 2), ("1 thread", 1), ("1 thread", 1)]
    assert torch.get_num_threads() == 1
    list(threads.run(Settings(threads=2), Silent()))
    assert torch.get_num_threads() == 2
