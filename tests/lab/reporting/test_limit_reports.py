"""Reports of arms at the limit: read as a number, printed as ∞, sorted last."""

import json
import math

import pytest

from sinkformers.lab.artefacts import catalogue
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.reporting import finals, page, tables, words
from sinkformers.lab.reporting.comparison import side
from sinkformers.lab.reporting.curves import learning
from sinkformers.lab.reporting.filling import filled
from sinkformers.lab.reporting.panels import colours
from sinkformers.lab.reporting.records import find
from sinkformers.lab.reporting.summary import summarise
from tests.lab.fake_runs import write_run


@pytest.fixture
def runs(tmp_path):
    """Write two patch sizes with 1, 5 and ∞ iterations. The limit is ahead of 5 at patch 7 and behind it at patch 4."""
    for patch, finals_by_count in ((7, {"inf": 0.8, 21: 0.7, 5: 0.75, 1: 0.6}), (4, {1: 0.6, 5: 0.9, "inf": 0.85})):
        for n_iters, final in finals_by_count.items():
            for seed in (0, 1):
                arm = f"patch-{patch}-n-{n_iters}"
                write_run(tmp_path, arm=arm, patch=patch, n_iters=n_iters, seed=seed, final=final + seed / 100)
    return tmp_path


@pytest.fixture
def summary(runs):
    return summarise(find([runs]))[0]


def test_the_limit_is_read_as_a_number_and_sorted_last(runs):
    found = [record.metrics["settings"] for record in find([runs]).records]
    expected = [(4, 1), (4, 5), (4, math.inf), (7, 1), (7, 5), (7, 21), (7, math.inf)]
    assert [(each["patch"], each["n_iters"]) for each in found][::2] == expected


@pytest.mark.parametrize("n_iters", ["∞", "Inf", 1.5, None, True])
def test_other_words_for_n_iters_are_refused(tmp_path, n_iters):
    write_run(tmp_path, arm="n-x", n_iters=n_iters)
    with pytest.raises(ExperimentError, match=r'settings\.n_iters (must be a whole number or "inf", got|is missing)'):
        find([tmp_path])


def test_tables_name_the_arms_in_order(summary):
    models = [row[0] for row in tables.results(summary).rows]
    sides = {1: "SoftMax"} | {n: f"Sinkhorn, n_iters = {n}" for n in (5, 21, "∞")}
    expected = ((4, (1, 5, "∞")), (7, (1, 5, 21, "∞")))
    assert models == [f"{sides[n]}, patches of {patch}" for patch, counts in expected for n in counts]


def test_the_limit_is_compared_with_the_most_iterations(summary):
    assert [(finite.arm, limit.arm) for finite, limit in summary.limits] == [
        ("patch-4-n-5", "patch-4-n-inf"),
        ("patch-7-n-21", "patch-7-n-inf"),
    ]
    assert words.notes(summary)[0] == (
        "In 2 comparisons with n_iters = 5 or 21 the limit, n_iters = ∞, has the better median test accuracy 1 time, "
        "the worse 1 time. Every run of one arm is better than every run of the other 2 times."
    )
    table = tables.limit(summary)
    assert table.headings == (
        "settings",
        "SoftMax",
        *(f"Sinkhorn, n_iters = {n}" for n in (5, 21, "∞")),
        "seeds ahead of fewer",
    )
    assert table.rows == (
        ("patches of 4", "60.50%", "90.50%", "–", "85.50%", "0 of 2 (n_iters = 5)"),
        ("patches of 7", "60.50%", "75.50%", "70.50%", "80.50%", "2 of 2 (n_iters = 21)"),
    )


def test_only_seeds_of_both_arms_are_compared(tmp_path):
    write_run(tmp_path, n_iters=3, final=0.5, seed=0)
    for seed in (0, 7):
        write_run(tmp_path, n_iters="inf", arm="n-inf", final=0.6, seed=seed)
    (row,) = tables.limit(summarise(find([tmp_path]))[0]).rows
    assert row[0] == "all"
    assert row[-1] == "1 of 1 (n_iters = 3)"


def test_without_an_arm_at_the_limit_nothing_is_said_of_it(tmp_path):
    for n_iters in (1, 3):
        write_run(tmp_path, n_iters=n_iters)
    summary = summarise(find([tmp_path]))[0]
    assert summary.limits == []
    assert not any("limit" in note for note in words.notes(summary))


def test_the_limit_beside_softmax_alone_is_no_comparison_of_iterations(tmp_path):
    for n_iters in (1, "inf"):
        write_run(tmp_path, n_iters=n_iters, arm=f"n-{n_iters}")
    summary = summarise(find([tmp_path]))[0]
    assert summary.limits == []
    assert len(summary.pairs) == 1


def test_a_page_is_filled_with_the_comparison(summary):
    place = "<!-- results: figure6 small limit -->\n<!-- end -->"
    assert "| patches of 7 | 60.50% | 75.50% | 70.50% | 80.50% | 2 of 2 (n_iters = 21) |" in filled(place, [summary])


def test_figures_show_infinity(runs):
    records = find([runs]).records
    assert side(math.inf) == "Sinkhorn, n_iters = ∞"
    labels = [text.get_text() for text in learning(records).legends[0].get_texts()]
    assert labels == ["SoftMax", *(f"Sinkhorn, n_iters = {n}" for n in (5, 21, "∞"))]
    assert finals.swept(records) == "n_iters"
    axes = finals.against(records, "n_iters").axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "5", "21", "∞"]
    assert len(set(colours([1, 5, 21, math.inf]).values())) == 4


def test_the_report_is_written(runs, tmp_path):
    page.write(summarise(find([runs]), catalogue.find), tmp_path / "report")
    text = (tmp_path / "report" / "figure6-small.csv").read_text(encoding="utf-8")
    assert "patch-7-n-inf,7,inf,accuracy,2" in text


def test_a_label_of_the_paper_is_not_given_to_the_limit(tmp_path):
    for n_iters in (1, 3, "inf"):
        write_run(tmp_path, artefact="table1-pct", n_iters=n_iters, arm=f"n-{n_iters}")
    rows = summarise(find([tmp_path]), catalogue.find)[0].rows
    assert [row.paper.get("best") for row in rows] == [0.932, 0.931, None]


def test_equal_records_are_one_run_and_json_on_disk_is_a_string(runs):
    file = next(runs.glob("figure6/small/patch-7-n-inf/seed-0/metrics.json"))
    assert json.loads(file.read_text())["settings"]["n_iters"] == "inf"
    assert len(find([runs, runs / "figure6"]).records) == 14
