"""Sharded attention is that of one device, and says so where it cannot be."""

import pytest

from tests.distributed import failures, short_checks, slow_checks
from tests.distributed.world import PASSED, run_world


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_world("tests.distributed.short_checks", 4, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("check", short_checks.CHECKS)
def test_on_four_ranks(check, outcomes):
    passed(check, outcomes)


@pytest.fixture(scope="module")
def slow_outcomes(tmp_path_factory):
    return run_world("tests.distributed.slow_checks", 4, tmp_path_factory.mktemp("world"))


@pytest.mark.slow
@pytest.mark.parametrize("check", slow_checks.CHECKS)
def test_all_calls_on_four_ranks(check, slow_outcomes):
    passed(check, slow_outcomes)


def passed(check, outcomes):
    for rank, results in enumerate(outcomes):
        assert results.get(check, "not run: an earlier check failed") == PASSED, f"rank {rank}"


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_with_the_name_of_the_operation(tmp_path):
    outcomes = run_world("tests.distributed.failures", 3, tmp_path)
    assert outcomes == [dict.fromkeys(failures.CHECKS, PASSED)] * 2 + [None]
