"""What is written is what is read, and the newest full run of a suite wins."""

import pytest

from benchmarks import records
from benchmarks.measurement import Measurement
from benchmarks.records import Run
from benchmarks.summary import spread


def run(started="2030-01-02T03:04:05+00:00", quick=False, rows=None):
    machine = {"cpu": "Some CPU @ 2.0 (TM)", "cores": 2, "isa": ["avx2"], "threads": 2}
    return Run(started, "python -m benchmarks", quick, rows, machine, {"torch": "9.9"}, "abc", False)


def timed(suite="attention", row="native", seconds=(1.0, 2.0, 3.0), **rest):
    return Measurement(suite, "16 × 512", row, "timed", seconds=spread(seconds), ratio=spread([0.5]), **rest)


def test_what_is_written_is_read(tmp_path):
    lines = [timed(n_iters=3, deviation=1e-7), Measurement("memory", "1 × 8", "sdpa", "measured", peak_bytes=5)]
    lines.append(Measurement("scaling", "n", "native", "fitted", fit={"time exponent": 2.0}))
    for line in lines:
        records.append(run(), line, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["2030-01-02-some-cpu-2-0-tm.jsonl"]
    assert records.read(tmp_path) == [(run(), line) for line in lines]


def test_the_newest_full_run_wins_suite_by_suite():
    old, new = run("2030-01-01T00:00:00+00:00"), run("2030-02-01T00:00:00+00:00")
    quick = run("2030-03-01T00:00:00+00:00", quick=True)
    pairs = [(new, timed(row="new")), (old, timed(row="old")), (quick, timed(row="quick"))]
    pairs.append((run("2030-04-01T00:00:00+00:00", rows=["native"]), timed(row="partial")))
    pairs += [(quick, timed("masks", row="quick")), (old, timed("sharp", row="old"))]
    chosen = {suite: [m.row for m in found] for suite, (_, found) in records.newest(pairs).items()}
    assert chosen == {"attention": ["new"], "masks": ["quick"], "sharp": ["old"]}


def test_a_broken_line_is_named(tmp_path):
    records.append(run(), timed(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"jsonl, line 2, is no record"):
        records.read(tmp_path)
