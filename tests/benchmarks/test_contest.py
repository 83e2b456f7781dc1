"""A wrong row is refused, a missing one keeps its line and its reason, a failing one costs the others nothing."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks import agreement
from benchmarks.case import Case, draw
from benchmarks.contest import Entry, compete
from benchmarks.rows import ROWS, Row
from benchmarks.rows.row import of_torch, peer
from benchmarks.steps import Unavailable
from benchmarks.suites.entries import attention_entry
from benchmarks.timing import Plan
from tests.benchmarks.fake import Clock, FakeStep, Silent, entry, raises

PLAN = Plan(0.01, least=2, most=2)
TINY = Case(2, 3, 17, 5, n_iters=3)


def contest(*entries, plan=PLAN, baseline="sdpa"):
    return {m.row: m for m in compete("suite", "shape", entries, plan, Silent(), baseline=baseline)}


def test_a_wrong_row_is_never_timed():
    wrong = FakeStep(Clock(), 0.0)
    got = contest(entry("sdpa", FakeStep(Clock(), 0.0)), entry("wrong", wrong, deviation=2e-4))["wrong"]
    assert got.status == "refused"
    assert got.seconds is None
    assert "2.0e-04" in got.reason
    assert wrong.called == 0


@pytest.mark.parametrize("deviation", [math.nan, math.inf])
def test_neither_is_one_that_is_not_a_number(deviation):
    assert contest(entry("wrong", FakeStep(Clock(), 0.0), deviation))["wrong"].status == "refused"


@pytest.mark.parametrize("error", [Unavailable("not installed"), NotImplementedError("still to come")])
def test_a_missing_row_keeps_its_line_and_its_reason(error):
    step = FakeStep(Clock(), 0.0)
    results = contest(entry("sdpa", step), Entry("missing", raises(error), raises(error), {"n_iters": 3}))
    assert (results["missing"].status, results["missing"].reason) == ("left out", str(error))
    assert results["missing"].n_iters == 3
    assert results["sdpa"].seconds is not None


def test_a_failing_row_costs_the_others_nothing():
    broken = Entry("broken", raises(RuntimeError("\nno\nmemory")), lambda: agreement.Checked(0.0, 0.0))
    results = contest(entry("sdpa", FakeStep(Clock(), 0.0)), broken)
    assert results["broken"].status == "failed"
    assert results["broken"].reason == "RuntimeError: no"
    assert results["sdpa"].status == "timed"


def test_without_the_yardstick_there_is_no_ratio():
    got = contest(entry("sdpa", FakeStep(Clock(), 0.0), deviation=1.0), entry("ours", FakeStep(Clock(), 0.0)))["ours"]
    assert got.seconds is not None
    assert got.ratio is None


def test_a_peer_that_is_not_there_says_how_to_get_it():
    with pytest.raises(Unavailable, match=r"no_such_peer cannot be imported .*'\.\[peers-none\]'"):
        peer("no_such_peer", "peers-none")


def test_a_row_that_would_not_fit_is_left_out():
    hungry = Row("hungry", "hungry", raises(AssertionError("was prepared")), matrices=1e12)
    with pytest.raises(Unavailable, match="would need about"):
        hungry.prepare(draw(TINY))


@pytest.mark.parametrize("padding", [None, 0.25])
@pytest.mark.parametrize("name", ["sdpa", "torch", "reference"])
def test_honest_rows_agree(name, padding):
    case = Case(2, 3, 17, 5, n_iters=1 if name == "sdpa" else 5, padding=padding)
    off = agreement.check_attention(case, ROWS[name].prepare, ROWS[name].formula).deviation
    assert off < 1e-5


@pytest.mark.parametrize("name", ["softmax", "log-loop", "pot-log", "pot-kernel"])
@pytest.mark.parametrize("backward", [True, False])
def test_peers_do_the_same_job(name, backward):
    case = Case(2, 3, 17, 5, n_iters=1 if name == "softmax" else 5, backward=backward)
    assert agreement.check_attention(case, ROWS[name].prepare, ROWS[name].formula).deviation < 1e-5


def test_the_ten_lines_compute_the_same_before_they_are_compiled():
    from benchmarks.rows.loops import kernel_domain

    row = of_torch(lambda q, k, v, case, _masks: kernel_domain(q, k, v, case.n_iters))
    assert agreement.check_attention(Case(2, 3, 17, 5, n_iters=5), row, "sinkhorn").deviation < 1e-5


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx, grad: Tensor) -> Tensor:
        return 1.001 * grad


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, k, v: (q, k, v * 1.001),
        lambda q, k, v: (WrongGradient.apply(q), k, v),
        lambda q, k, v: (q, k, torch.cat([v[..., :1, :] * torch.nan, v[..., 1:, :]], -2)),
        lambda q, k, v: (q, k.roll(1, -2), v),
    ],
    ids=["output", "gradient", "nan", "tokens"],
)
def test_a_small_fault_anywhere_is_refused(spoil):
    def attention(query, key, value, case, masks):
        return torch.softmax(torch.zeros(()), 0) * sound(*spoil(query, key, value), case, masks)

    def sound(query, key, value, case, _masks):
        return (query @ key.mT / math.sqrt(case.d)).softmax(-1) @ value

    good = Row("sdpa", "good", of_torch(sound), formula="softmax")
    bad = Row("bad", "bad", of_torch(attention), formula="softmax")
    results = contest(attention_entry(good, TINY), attention_entry(bad, TINY))
    assert (results["sdpa"].status, results["bad"].status) == ("timed", "refused")


def test_beyond_the_references_reach_repeated_tokens_know_the_answer(monkeypatch):
    """The trick itself, where the reference can still follow: 51 tokens made of 17, compared directly."""
    from benchmarks import case as cases

    monkeypatch.setattr(cases, "LARGEST_DIRECT", 17)
    agreement.expected.cache_clear()
    large = Case(2, 3, 51, 5, n_iters=5)
    inputs, base, index = cases.with_known_answer(large)
    assert base.case.n == 17
    assert sorted(index.tolist()) == sorted(list(range(17)) * 3)
    step = ROWS["reference"].prepare_step(inputs)
    step.call()
    want = [x[..., index, :] for x in agreement.expected(base.case, "sinkhorn")]
    assert agreement.deviation(step.outcome(), want) < 1e-5
    assert agreement.deviation(step.outcome(), [x.roll(1, -2) for x in want]) > 1e-2
    agreement.expected.cache_clear()
