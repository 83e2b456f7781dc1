"""Arms against SoftMax whatever their column steps, and the reading of curves after equal seconds."""

import pytest

from sinkformers.lab.artefacts.artefact import Artefact, ExperimentError
from sinkformers.lab.reporting import page, tables, words
from sinkformers.lab.reporting.comparison import comparisons, with_softmax
from sinkformers.lab.reporting.equal_time import readings
from sinkformers.lab.reporting.filling import filled
from sinkformers.lab.reporting.records import find
from sinkformers.lab.reporting.summary import summarise
from tests.lab.fake_runs import epoch, write_run

ARTEFACT = Artefact(name="figure6", title="A title", paper="not in the paper", equal_time=True)
TIMED = {"seconds_per_epoch": [4.0, 4.0]}


@pytest.fixture
def summary(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, seed=seed, arm="a-n-1", positions="rotary", final=0.8)  # 0.1, 0.4, 0.8 at 0, 2 and 4 s
        write_run(tmp_path, seed=seed, arm="a-tau-n-3", positions="rotary", tau=0.5, n_iters=3, final=0.9, run=TIMED)
    write_run(tmp_path, seed=0, arm="b-n-3", positions="learned", n_iters=3)
    [summary] = summarise(find([tmp_path]), lambda _name: ARTEFACT)
    return summary


def test_tau_has_no_effect_on_the_softmax_arm(summary):
    assert [(softmax.arm, arm.arm) for softmax, arm in summary.pairs] == [("a-n-1", "a-tau-n-3")]
    assert words.finding(summary).startswith("Median test accuracy: SoftMax 80.00%")
    drawn = with_softmax(comparisons(summary.records))
    assert [(each.settings, list(each.sides)) for each in drawn] == [
        ({"positions": "learned"}, [3]),
        ({"positions": "rotary"}, [1]),
        ({"positions": "rotary", "tau": 0.5}, [1, 3]),
    ]


def test_arms_are_read_when_the_faster_one_ends(summary):
    [reading] = readings(summary)
    assert reading.seconds == 4
    assert reading.softmax == 0.8
    assert reading.sinkformer == pytest.approx(0.45)  # after its first epoch, half of the training
    assert (reading.ahead, reading.seeds) == (0, 2)


def test_between_epochs_it_is_interpolated(tmp_path):
    write_run(tmp_path, epochs=[epoch(0, 0.1), epoch(1, 0.5), epoch(2, 0.7)], run={"seconds_per_epoch": [1.0, 2.0]})
    write_run(tmp_path, n_iters=3, epochs=[epoch(0, 0.2), epoch(1, 0.6), epoch(2, 0.8)], run=TIMED)
    [summary] = summarise(find([tmp_path]))
    [reading] = readings(summary)
    assert (reading.seconds, reading.softmax) == (3, 0.7)
    assert reading.sinkformer == pytest.approx(0.2 + 3 / 4 * 0.4)


@pytest.mark.parametrize("run", [{"seconds_per_epoch": [1.0]}, {"seconds_per_epoch": []}, {"threads": 2}], ids=str)
def test_runs_that_were_not_timed_alike_are_left_out(tmp_path, run):
    write_run(tmp_path)
    write_run(tmp_path, n_iters=3, run=run)
    [summary] = summarise(find([tmp_path]))
    assert readings(summary) == []


def test_the_report_shows_it(summary, tmp_path):
    model = "Sinkhorn, n_iters = 3, rotary positions, tau 0.5"
    row = f"| {model} | SoftMax, rotary positions | 4 | 45.00% | 80.00% | 0 of 2 |"
    assert row in tables.markdown(tables.equal_time(summary))
    written = page.write([summary], tmp_path / "report").read_text(encoding="utf-8")
    assert "After equal seconds" in written
    assert row in (tmp_path / "report" / "figure6-small.md").read_text(encoding="utf-8")
    place = "<!-- results: figure6 small equal-time -->\n<!-- end -->"
    assert row in filled(place, [summary])


def test_an_empty_place_may_wait_for_its_records(summary):
    empty = "<!-- results: causal-lm small results -->\n\n<!-- end -->"
    assert filled(empty, [summary]) == empty
    with pytest.raises(ExperimentError, match="a page asks for causal-lm, small, and no run of it is there"):
        filled(empty.replace("\n\n", "\nsome text\n"), [summary])
