"""The arithmetic of a table: medians, quartiles, ratios, fits."""

import math

import pytest

from benchmarks.summary import exponent, line, paired_ratio, spread


def test_the_middle_and_the_middle_half():
    got = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (got.median, got.first, got.third, got.count) == (3.0, 2.0, 4.0, 5)


def test_an_outlier_moves_no_median():
    assert spread([1.0, 1.0, 1.0, 1.0, 1000.0]).median == 1.0


def test_one_number_is_its_own_spread():
    assert spread([7.0]) == spread([7.0, 7.0]).__class__(7.0, 7.0, 7.0, 1)


def test_nothing_has_no_spread():
    with pytest.raises(ValueError, match="at least one number"):
        spread([])


def test_a_round_that_is_slow_for_all_cancels():
    baseline = {0: 1.0, 1: 10.0, 2: 2.0, 3: 5.0}
    row = {turn: 3 * seconds for turn, seconds in baseline.items() if turn != 2}
    got = paired_ratio(row, baseline)
    assert got is not None
    assert (got.median, got.first, got.third, got.count) == (3.0, 3.0, 3.0, 3)


def test_rounds_in_which_only_one_took_part_do_not_count():
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None


def test_a_line_is_found():
    intercept, slope = line([1.0, 3.0, 5.0, 21.0], [2.0 + 0.25 * x for x in (1, 3, 5, 21)])
    assert math.isclose(intercept, 2.0)
    assert math.isclose(slope, 0.25)


def test_a_power_is_found_whatever_its_factor():
    sizes = [256.0, 1024.0, 4096.0]
    assert math.isclose(exponent(sizes, [3e-9 * n**2 for n in sizes]), 2.0)
    assert math.isclose(exponent(sizes, [70.0 * n for n in sizes]), 1.0)


def test_one_point_makes_no_line():
    with pytest.raises(ValueError, match="two points"):
        line([1.0], [1.0])
