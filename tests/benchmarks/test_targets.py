"""Every target is about something that a suite measures, and the newer ones are judged as their texts say."""

import importlib

import pytest

import sinkformers
from benchmarks.report import bounds
from benchmarks.settings import Settings
from benchmarks.suites import SUITES
from benchmarks.suites.bias import UNMASKED
from benchmarks.suites.conversion import CONVERTED
from tests.benchmarks.fake import Silent
from tests.benchmarks.test_report import timed, verdicts

BOUNDS = [
    ("attention", bounds.ATTENTION, "native"),
    ("inference", bounds.INFERENCE, "native"),
    ("bias", bounds.MASKED, "native"),
    ("half", bounds.HALF, "native"),
    ("long", bounds.LONG, "native"),
    ("training", bounds.TRAINING, "native"),
    ("conversion", bounds.CONVERSION, CONVERTED),
    ("small", bounds.CALL | bounds.OPERATOR, "native"),
    ("limit", bounds.LIMIT, "native"),
    ("limit", bounds.LIMIT_MODEL, CONVERTED),
]


@pytest.mark.parametrize(("suite", "table", "row"), BOUNDS, ids=[f"{name}-{row}" for name, _, row in BOUNDS])
def test_every_bound_is_about_a_row_that_its_suite_times(suite, table, row, monkeypatch):
    entered = set()

    def record(_suite, shape, entries, *_rest, **_options):
        entered.update((shape, entry.row, entry.settings.get("n_iters")) for entry in entries)
        return []

    module = importlib.import_module(f"benchmarks.suites.{suite}")
    monkeypatch.setattr(module, "compete", record)
    monkeypatch.setattr(module, "curves", lambda *_: iter(()), raising=False)
    list(SUITES[suite](Settings(), Silent()))
    assert {(shape, row, n_iters) for shape, counts in table.items() for n_iters in counts} <= entered


def test_each_contest_has_its_own_limit_and_the_old_one_comes_back(monkeypatch):
    from benchmarks.suites import long

    before, during = sinkformers.workspace_limit(), {}

    def fail_at_the_last(_suite, shape, *_rest):
        during[shape] = sinkformers.workspace_limit()
        if shape == "8 × 8192, 1 GiB, forward":
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(long, "compete", fail_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        list(long.run(Settings(), Silent()))
    assert list(during.values()) == [2**26, 2**30, 2**26, 2**30]
    assert sinkformers.workspace_limit() == before


def test_a_band_window_is_compared_with_our_own_call_without_a_mask():
    shape = "16 × 512, band window"
    found = [timed("bias", shape, "native", 0.6, 5), timed("bias", shape, "native", 1.2, 5, variant=UNMASKED)]
    target = verdicts({"bias": found})[f"{shape}, n_iters 5: time ÷ unmasked"]
    assert (target.measured, target.verdict) == ("0.500", "met")


@pytest.mark.parametrize(("one", "verdict"), [(1.9, "met"), (1.7, "**missed**")])
def test_two_threads_are_compared_with_one(one, verdict):
    plain = timed("threads", "16 × 512", "native", 1.0, 5)
    found = [plain, timed("threads", "16 × 512", "native", one, 5, variant="1 thread")]
    target = verdicts({"threads": found})["16 × 512, n_iters 5: time of one thread ÷ time of two"]
    assert target.verdict == verdict
    assert target.value == pytest.approx(one)


def test_conversions_are_divided_by_the_original():
    found = [timed("conversion", "Swin, training step", CONVERTED, 0.9, 3, baseline="original")]
    target = verdicts({"conversion": found})["Swin, training step, n_iters 3: time ÷ original"]
    assert target.verdict == "met"
