"""Rounds are interleaved, warm-up is discarded, slow rows skip rounds evenly."""

import pytest

from benchmarks.timing import Plan, interleave, is_called, rounds_for
from tests.benchmarks.fake import Clock, FakeStep


def test_every_round_calls_every_row_in_turn():
    clock = Clock()
    steps = {name: FakeStep(clock, 1.0, name) for name in "abc"}
    times = interleave(steps, Plan(budget=12.0, least=2), clock=clock)
    warm_up = clock.calls[:6]
    assert sorted(warm_up) == list("aabbcc")
    assert clock.calls[6:] == list("abc") * 4
    assert all(by_round == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0} for by_round in times.values())


def test_what_warming_up_cost_is_not_in_the_times():
    clock = Clock()
    step = FakeStep(clock, 0.0)
    costs = iter([100.0, *[1.0] * 99])
    step.call = lambda: setattr(clock, "now", clock.now + next(costs))
    assert set(interleave({"compiled": step}, Plan(5.0), clock=clock)["compiled"].values()) == {1.0}


def test_every_call_starts_afresh():
    clock = Clock()
    step = FakeStep(clock, 1.0)
    interleave({"a": step}, Plan(4.0, least=1), clock=clock)
    assert step.called == 6  # each of them asserts that it was reset


def test_a_slow_row_is_warmed_up_by_its_check_alone():
    clock = Clock()
    steps = {"slow": FakeStep(clock, 4.0), "compiled": FakeStep(clock, 4.0)}
    interleave(steps, Plan(1.0), known={"slow": 4.0}, clock=clock)
    assert (steps["slow"].called, steps["compiled"].called) == (2, 3)


def test_a_slow_row_sits_rounds_out_and_the_yardstick_never_does():
    clock = Clock()
    steps = {"sdpa": FakeStep(clock, 2.0), "fast": FakeStep(clock, 0.5), "slow": FakeStep(clock, 4.0)}
    times = interleave(steps, Plan(budget=30.0, least=2), always="sdpa", clock=clock)
    assert len(times["fast"]) == len(times["sdpa"]) == 20
    assert sorted(times["slow"]) == [0, 10]


@pytest.mark.parametrize(("wanted", "total"), [(1, 1), (1, 7), (3, 7), (7, 7), (2, 60), (59, 60)])
def test_rounds_are_as_many_as_wanted_and_even(wanted, total):
    turns = [turn for turn in range(total) if is_called(turn, wanted, total)]
    assert len(turns) == wanted
    assert turns[0] == 0
    gaps = [after - before for before, after in zip(turns, [*turns[1:], total], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_the_number_of_rounds_stays_within_the_plan():
    plan = Plan(budget=100.0, least=5, most=60)
    assert rounds_for(1e-6, 10.0, plan) == 60
    assert rounds_for(1.0, 10.0, plan) == 10
    assert rounds_for(2.9, 10.0, plan) == 5
    assert rounds_for(30.0, 10.0, plan) == 2


def test_nobody_to_time():
    assert interleave({}, Plan(1.0)) == {}
