"""The model of many GPUs: what it rests on, and that the page has its numbers."""

from pathlib import Path

import pytest

from benchmarks import sequence_parallel as model

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
MACHINE = model.MACHINES[0]


def test_the_page_has_what_the_command_prints():
    assert f"{model.START}\n\n{model.page()}\n\n{model.END}" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("kv", ["gather", "ring"])
def test_both_times_are_equal_at_the_shortest_length(kv):
    tokens = model.shortest_hidden(MACHINE, 64, 3, kv)
    computing, sending = model.seconds(MACHINE, model.workload(64, tokens, 3), kv)
    assert computing == pytest.approx(sending, rel=1e-3)


def test_products_of_one_softmax_call():
    """By hand: scores three times, gradients of weights, queries, keys and values, and the output: 2·n·m·h·d each."""
    work = model.workload(1, 64, 1)
    assert model.products(work, "gather") == 8 * 2 * 64 * 64 * model.HEADS * model.HEAD_DIM


def test_a_page_without_markers_is_refused(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    monkeypatch.setattr("sys.argv", ["sequence_parallel", "--fill", str(page)])
    with pytest.raises(SystemExit, match="has no markers"):
        model.main()
