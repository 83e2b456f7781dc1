"""The section on the limit and its targets, from made-up measurements."""

import math

import pytest

from benchmarks.measurement import Measurement
from benchmarks.report import bounds, page
from benchmarks.solvers import NEWTON, POT
from benchmarks.suites import limit
from benchmarks.suites.conversion import CONVERTED
from benchmarks.suites.limit_entries import ERROR, PRODUCTS, solver_label
from benchmarks.summary import spread
from tests.benchmarks.test_report import RUN, missing, timed, verdicts

SHAPE = "n = 1024, std 8"
AGAINST_POT = f"{SHAPE}: POT ÷ `sinkhorn_limit`"


def solved(row, products, seconds, error=1e-7, shape=SHAPE):
    fit = {PRODUCTS: float(products), ERROR: error}
    return Measurement("limit", shape, row, "timed", seconds=spread([seconds]), fit=fit, n=1024)


def curve(row, shape=SHAPE):
    return Measurement("limit", shape, row, "measured", variant="curve", curve=((1.0, 0.5), (9.0, 1e-6)))


@pytest.mark.parametrize(("ratio", "verdict"), [(1.19, "met"), (1.21, "**missed**")])
def test_attention_at_the_limit_is_compared_with_21_iterations(ratio, verdict):
    shape = "16 × 512, std 4"
    found = [timed("limit", shape, "native", 0.8, 21), timed("limit", shape, "native", ratio, math.inf)]
    target = verdicts({"limit": found})[f"{shape}, n_iters inf: time ÷ n_iters 21"]
    assert target.value == pytest.approx(ratio / 0.8)
    assert target.verdict == verdict


def test_the_model_is_compared_with_the_original():
    found = [timed("limit", limit.MODEL, CONVERTED, 1.4, math.inf, baseline="original")]
    found.append(timed("limit", limit.MODEL, CONVERTED, 9.0, 3, baseline="original"))
    assert verdicts({"limit": found})[f"{limit.MODEL}, n_iters inf: time ÷ SDPA"].measured == "1.400"


@pytest.mark.parametrize(("products", "verdict"), [(150, "met"), (151, "**missed**")])
def test_products_are_counted(products, verdict):
    target = verdicts({"limit": [curve(NEWTON), solved(NEWTON, products, 0.1)]})[
        f"{SHAPE}: products of `sinkhorn_limit`"
    ]
    assert (target.measured, target.wanted, target.verdict) == (str(products), "≤ 150", verdict)


@pytest.mark.parametrize(
    ("seconds", "error", "measured", "verdict"),
    [
        (3.1, 1e-7, "31.0", "met"),
        (2.9, 1e-7, "29.0", "**missed**"),
        (3.1, 1e-2, "at least 31.0", "met"),
        (2.9, 1e-2, "at least 29.0", "undecided"),
    ],
)
def test_the_time_of_a_solver_that_stopped_is_a_lower_bound(seconds, error, measured, verdict):
    target = verdicts({"limit": [solved(NEWTON, 70, 0.1), solved(POT, 5000, seconds, error)]})[AGAINST_POT]
    assert (target.measured, target.verdict) == (measured, verdict)


def test_bounds_of_solvers_are_about_what_the_suite_solves():
    labels = {solver_label(limit.N, std): alone for std, alone in limit.SOLVER_STDS.items()}
    assert set(bounds.LIMIT_PRODUCTS) <= set(labels)
    assert not any(labels[shape] for shape in bounds.LIMIT_POT)


def test_the_section_has_a_picture_and_three_tables(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("<!-- benchmark: limit -->\n<!-- end -->\n", encoding="utf-8")
    found = [
        timed("limit", "64 × 128, std 1", "sdpa", 1.0),
        timed("limit", "64 × 128, std 1", "native", 0.9, math.inf),
        timed("limit", limit.MODEL, CONVERTED, 1.4, math.inf, baseline="original"),
        curve("sinkhorn"),
        curve(NEWTON),
        solved(NEWTON, 70, 0.1),
        solved(POT, 5000, 40.0, 3e-4),
        missing("limit", SHAPE, "ott-anderson", "jax cannot be imported"),
    ]
    written = page.fill(path, {"limit": (RUN, found)})
    text = path.read_text(encoding="utf-8")
    assert [file.name for file in written] == ["page.md", "benchmark-limit-products.png"]
    assert all(file.exists() for file in written)
    assert "![Column error against products](assets/benchmark-limit-products.png)" in text
    assert "| 64 × 128, std 1 | 1 (1 s) | 0.90 (0.90–0.90) |" in text
    assert f"| {limit.MODEL} | 1.40 (1.40–1.40) |" in text
    assert "| **`sinkhorn_limit`** | 70 products, 100 ms |" in text
    assert "5000 products, 40 s, stopped at 3e-04 |" in text
    assert f"- OTT-JAX, Anderson acceleration: left out, jax cannot be imported ({SHAPE})." in text
