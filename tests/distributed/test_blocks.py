"""`with` blocks that are nested, or left in another order than they were entered."""

import pytest

from sinkformers.distributed import SequenceGroup, active_group, context, count_traffic, sequence_parallel
from sinkformers.distributed.traffic import record


def test_counters_that_have_counted_the_same_are_told_apart():
    with count_traffic() as outer:
        with count_traffic() as inner:
            pass
        record("keys", 8)
    record("keys", 8)
    assert (outer, inner) == ({"keys": 8}, {})


@pytest.fixture
def blocks(monkeypatch):
    """Two blocks of the same setting, as two threads may enter them, and one of another."""
    monkeypatch.setattr(context, "sequence_group", lambda _caller, group, kv: SequenceGroup(group, kv))
    return [sequence_parallel(group) for group in ("one", "one", "two")]  # pyright: ignore[reportArgumentType]


def test_the_innermost_block_counts(blocks):
    with blocks[0], blocks[2]:
        assert active_group() == ("two", "gather")
    assert active_group() is None


def test_a_block_that_an_exception_leaves_is_left(blocks):
    with pytest.raises(KeyError), blocks[0]:
        raise KeyError
    assert active_group() is None


def test_no_setting_is_left_where_threads_leave_their_blocks_in_another_order(blocks):
    for block in blocks:
        block.__enter__()
    blocks[0].__exit__(None, None, None)
    assert active_group() == ("two", "gather")
    blocks[2].__exit__(None, None, None)
    assert active_group() == ("one", "gather")
    blocks[1].__exit__(None, None, None)
    assert active_group() is None
