"""Sharded attention is that of one device, and says so where it cannot be."""

import pytest

from tests.distributed import short_checks
from tests.distributed.world import PASSED, run_world


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_world("tests.distributed.short_checks", 4, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("check", short_checks.CHECKS)
def test_on_four_ranks(check, outcomes):
    for rank, results in enumerate(outcomes):
        assert results.get(check, "not run: an earlier check failed") == PASSED, f"rank {rank}"
