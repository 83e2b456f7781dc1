"""Tables, targets and the page, from made-up measurements."""

import pytest

from benchmarks.measurement import Measurement
from benchmarks.records import Run
from benchmarks.report import page, tables
from benchmarks.report.targets import targets
from benchmarks.summary import spread

RUN = Run(
    "2030-01-02T03:04:05+00:00",
    "python -m benchmarks attention",
    False,
    None,
    {"cpu": "Some CPU", "cores": 2, "isa": ["avx2"], "threads": 2},
    {"torch": "9.9"},
    "abc123",
    True,
)


def timed(suite, shape, row, ratio, n_iters=None, baseline="sdpa", **rest):
    return Measurement(
        suite, shape, row, "timed", n_iters, seconds=spread([ratio]), ratio=spread([ratio]), baseline=baseline, **rest
    )


def missing(suite, shape, row, reason, **rest):
    return Measurement(suite, shape, row, "left out", reason=reason, **rest)


def verdicts(suites):
    return {target.text: target for target in targets(suites)}


def test_a_table_has_equal_lines():
    assert tables.table(["a", "b"], [["1", "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"
    with pytest.raises(ValueError, match="needs 2 cells"):
        tables.table(["a", "b"], [["1"]])


def test_a_grid_has_rows_by_shapes_and_reasons_below():
    found = [
        timed("attention", "64 × 128", "sdpa", 1.0),
        timed("attention", "64 × 128", "native", 0.7, 3),
        timed("attention", "16 × 512", "native", 0.8, 3),
        missing("attention", "64 × 128", "keops", "not installed", n_iters=3),
    ]
    text = tables.grid(found, tables.label, tables.shape, tables.ratio_cell)
    lines = text.splitlines()
    assert lines[0] == "|  | 64 × 128 | 16 × 512 |"
    assert lines[3].endswith("n_iters 3 | 0.70 (0.70–0.70) | 0.80 (0.80–0.80) |")
    assert lines[-1] == "- KeOps, streaming log domain: left out, not installed (64 × 128 at n_iters 3)."


def test_a_target_is_met_up_to_its_bound_and_missed_beyond():
    def verdict(ratio):
        found = verdicts({"attention": [timed("attention", "128 × 197", "native", ratio, 5)]})
        return found["128 × 197, n_iters 5: time ÷ SDPA"].verdict

    assert (verdict(0.80), verdict(0.81)) == ("met", "**missed**")


def test_what_was_not_measured_is_not_met():
    nothing = targets({})
    assert len(nothing) > 30
    assert {target.verdict for target in nothing} == {"not measured"}


def test_peers_are_judged_by_the_nearest_of_them():
    found = [
        timed("attention", "16 × 512", "native", 1.0, 3, n=512),
        timed("attention", "16 × 512", "native", 2.0, 21, n=512),
        timed("attention", "16 × 512", "pot-log", 9.0, 3, n=512),
        timed("attention", "16 × 512", "pot-kernel", 5.0, 21, n=512),
        timed("attention", "16 × 512", "ten-lines", 1.1, 3, n=512),
        missing("attention", "16 × 512", "keops", "not installed", n=512, n_iters=3),
    ]
    result = verdicts({"attention": found})
    uncompiled = result["every uncompiled peer ÷ us, at worst, n ≥ 512"]
    assert (uncompiled.value, uncompiled.verdict) == (2.5, "**missed**")
    assert result["every uncompiled peer ÷ us, at worst, n < 512"].value is None
    assert result["the ten compiled lines ÷ us, at worst"].verdict == "met"


def test_one_head_is_compared_with_half_of_two():
    found = [
        timed("one-head", "2 × 4096", "native", 1.0, 5),
        timed("one-head", "2 × 4096", "native", 0.55, 5, variant="one head"),
    ]
    target = verdicts({"one-head": found})["one head at n = 4096: time ÷ half the time of two"]
    assert target.measured == "1.100"
    assert target.verdict == "met"


def test_variants_are_divided_by_the_plain_row_of_their_own_shape():
    found = []
    for shape, plain, padded in (("64 × 128", 1.0, 1.05), ("16 × 512", 2.0, 2.4)):
        found.append(timed("masks", shape, "native", plain, 5))
        found.append(timed("masks", shape, "native", padded, 5, variant="0 % padding"))
    target = verdicts({"masks": found})["0 % padding: time ÷ unmasked, at worst"]
    assert target.value == pytest.approx(1.2)
    assert target.verdict == "**missed**"


def test_memory_is_compared_with_sdpa():
    def peak(row, mebibytes, n_iters=None):
        return Measurement("memory", "16 × 2048", row, "measured", n_iters, peak_bytes=mebibytes * 2**20)

    target = verdicts({"memory": [peak("sdpa", 100), peak("native", 163, 21)]})
    extra = target["16 × 2048, n_iters 21: peak memory of a step − SDPA's"]
    assert (extra.measured, extra.wanted, extra.verdict) == ("63.0 MiB", "≤ 64.0 MiB", "met")


def test_tiny_matrices_are_compared_with_divisions():
    shape = "(65536, 4, 4)"
    found = [
        timed("operator", shape, "divisions", 1.0, 20, baseline="divisions"),
        timed("operator", shape, "native", 0.08, 20, baseline="divisions"),
    ]
    (target,) = [t for t in targets({"operator": found}) if "divisions" in t.text]
    assert target.measured == "12.500"
    assert target.verdict == "met"


@pytest.fixture
def empty_page(tmp_path):
    path = tmp_path / "benchmarks.md"
    sections = "\n".join(f"<!-- benchmark: {name} -->\nold\n<!-- end -->" for name in ("targets", "scaling", "masks"))
    path.write_text(f"# Prose\n\n{sections}\n\nstays\n", encoding="utf-8")
    return path


def test_the_page_is_filled_between_its_markers_again_and_again(empty_page):
    found = [timed("scaling", f"1 × {n}", "native", 1e-9 * n**2, 5, n=n, peak_bytes=n) for n in (256, 512)]
    written = page.fill(empty_page, {"scaling": (RUN, found)})
    text = empty_page.read_text(encoding="utf-8")
    assert text.startswith("# Prose")
    assert text.endswith("stays\n")
    assert "old" not in text
    assert "Some CPU (avx2), 2 cores, 2 threads; torch 9.9; commit abc123, with uncommitted changes." in text
    assert "Not recorded yet: `python -m benchmarks masks`." in text
    assert "![Time against n](assets/benchmark-time-n.png)" in text
    assert {path.name for path in written} == {"benchmarks.md", "benchmark-time-n.png", "benchmark-memory-n.png"}
    assert all(path.exists() for path in written)
    page.fill(empty_page, {"scaling": (RUN, found)})
    assert empty_page.read_text(encoding="utf-8") == text


def test_a_page_without_markers_is_named(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("prose", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.md has no markers"):
        page.fill(path, {})
