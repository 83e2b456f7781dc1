"""A record of the doctor is one that the report reads, and shows for its device."""

import json

import pytest
import torch

from benchmarks import records
from benchmarks.report import page
from sinkformers.doctor import record
from sinkformers.doctor.agreement import Finding
from sinkformers.doctor.benchmark import Shape, Timed

CPU = torch.device("cpu")
F32 = torch.float32
FINDINGS = [
    Finding(CPU, "attention", 5, "torch", F32, 3e-7, 4e-7, 1e-5),
    Finding(CPU, "attention", 5, "native", F32, 3e-2, 4e-7, 1e-5),
    Finding(CPU, "attention", 5, "triton", F32, cannot="it is for GPUs"),
    Finding(CPU, "sinkhorn", 5, "triton", F32, raised="RuntimeError: no"),
    Finding(CPU, "sinkhorn", 5, "torch", F32, 1e-7, 2e-7, 1e-5),
]
TIMED = [
    Timed(CPU, Shape(16, 512), F32, "sdpa", None, (2.0, 2.0, 2.0), (2.0, 2.0, 2.0)),
    Timed(CPU, Shape(16, 512), F32, "torch", 3, (3.0, 4.0, 5.0), (2.0, 2.0, 2.0)),
    Timed(CPU, Shape(16, 512), F32, "triton", 3, reason="it is for GPUs"),
]


@pytest.fixture
def folder(tmp_path):
    record.write(tmp_path / "mine.json", "python -m sinkformers.doctor --bench", FINDINGS, TIMED)
    return tmp_path


def test_it_is_read_as_it_was_written(folder):
    found = records.read(folder)
    assert len(found) == len(FINDINGS) + len(TIMED)
    states = [measurement.status for _, measurement in found]
    assert states == ["measured", "refused", "left out", "failed", "measured", "timed", "timed", "left out"]
    run, measurement = found[6]
    assert measurement.ratio.median == 2.0
    assert measurement.seconds.median == 4.0
    assert measurement.n_iters == 3
    assert run.versions["torch"] == str(torch.__version__)
    assert run.full


def test_the_report_shows_each_device(folder, tmp_path):
    lines = [json.loads(line) for line in (folder / "mine.json").read_text().splitlines()]
    other = [{**line, "suite": "doctor: Some GPU (sm_90)", "started": "2031-01-01T00:00:00+00:00"} for line in lines]
    (folder / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in other))
    target = tmp_path / "page.md"
    target.write_text("# Page\n<!-- benchmark: doctor -->\n<!-- end -->\n<!-- benchmark: targets -->\n<!-- end -->\n")
    page.fill(target, records.newest(records.read(folder)))
    text = target.read_text()
    assert "### Some GPU (sm_90)\n" in text
    assert text.count("### ") == 2
    assert "| attention, float32 | 4e-07 |" in text
    assert "refused, deviates by 3.0e-02, more than 1.0e-05" in text
    assert "failed, RuntimeError: no" in text
    assert "n_iters 3 | 2.00 (1.75–2.25) |" in text
    assert "; commit" not in text
    targets = text.split("<!-- benchmark: targets -->")[1]
    assert "Some GPU" not in targets
    assert "Not recorded yet: `make bench`." in targets


def test_without_a_record_the_page_says_how_to_make_one(tmp_path):
    assert "sinkformers doctor --bench --json" in page.render("doctor", {}, {}, tmp_path)
