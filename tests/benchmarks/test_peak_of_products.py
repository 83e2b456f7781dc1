"""The peak of the products, and what part of it the records show."""

from dataclasses import replace

import pytest
import torch

from benchmarks.case import Case
from benchmarks.measurement import Measurement
from benchmarks.report import page
from benchmarks.settings import Settings
from benchmarks.suites import peak
from benchmarks.summary import spread
from tests.benchmarks.fake import Silent
from tests.benchmarks.test_report import RUN

PEAKS = [
    Measurement("peak", dtype, "torch.mm", "measured", n=2048, fit={peak.RATE: rate})
    for dtype, rate in (("float32", 200.0), ("bfloat16", 100.0))
]


def render(**suites):
    return page.render("peak", {"peak": (RUN, PEAKS)} | suites, {}, page.Path())


def seconds_at(case, rate, suite, shape, **rest):
    """A measurement that took as long as its products take at a rate in GFLOP/s."""
    seconds = 14 * case.batch * case.heads * case.n**2 * case.d / (1e9 * rate)
    return Measurement(suite, shape, "native", "timed", 5, seconds=spread([seconds]), **rest)


def test_the_rate_is_that_of_the_best_round(monkeypatch):
    monkeypatch.setattr(peak, "N", 64)
    monkeypatch.setattr(peak, "interleave", lambda steps, _plan, **_: {name: {0: 3e-6, 1: 2e-6} for name in steps})
    found = list(peak.run(Settings(), Silent()))
    assert [m.shape for m in found] == ["float32", "float64", "bfloat16"]
    assert found[0].fit[peak.RATE] == pytest.approx(2 * 64**3 / 2e-6 / 1e9)


def test_products_run_in_their_precision(monkeypatch):
    monkeypatch.setattr(peak, "N", 8)
    dtypes = []

    def once(steps, _plan, **_):
        for step in steps.values():
            step.call()
            dtypes.append(step.outcome()[0].dtype)
        return {name: {0: 1.0} for name in steps}

    monkeypatch.setattr(peak, "interleave", once)
    list(peak.run(Settings(), Silent()))
    assert dtypes == [torch.float32, torch.float64, torch.bfloat16]


def test_seven_products_are_counted():
    assert peak.flops(Case(2, 8, 512)) == 7 * 2 * 16 * 512 * 512 * 64


def test_the_page_shows_the_peak_and_the_part_of_it_that_is_reached():
    text = render(attention=(RUN, [seconds_at(Case(2, 8, 512), 50.0, "attention", "16 × 512")]))
    assert "| float32 | 200 |" in text
    assert "|  | 16 × 512 |" in text
    assert text.endswith("n_iters 5 | 25 % |")


def test_half_precision_is_compared_with_float32_where_that_is_faster():
    found = seconds_at(Case(1, 8, 1024), 50.0, "half", "8 × 1024, bfloat16")
    assert render(half=(RUN, [found])).endswith("n_iters 5 | 25 % |")


def test_times_of_another_machine_or_of_other_threads_have_no_part():
    found = seconds_at(Case(2, 8, 512), 50.0, "attention", "16 × 512")
    for change in ({"cpu": "Another"}, {"isa": ["avx2", "avx512f"]}, {"threads": 1}):
        text = render(attention=(replace(RUN, machine=RUN.machine | change), [found]))
        assert "%" not in text
        assert text.endswith("need the suite `attention` on the same machine with the same threads.")
