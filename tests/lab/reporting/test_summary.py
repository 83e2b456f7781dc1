"""Statistics over all runs, overhead within one environment, and the sentences of the report."""

import csv
import io
import math

import pytest

from sinkformers.lab.artefacts.artefact import Arm, Artefact, ExperimentError, Preset
from sinkformers.lab.reporting import tables, words
from sinkformers.lab.reporting.records import find
from sinkformers.lab.reporting.summary import summarise
from tests.lab.fake_runs import MACHINE, epoch, write_run, write_unfinished

ARMS = (Arm("n-1", {"n_iters": 1}), Arm("n-3", {"n_iters": 3}))


def summary_of(root, artefact=None):
    [summary] = summarise(find([root]), lambda _name: artefact)
    return summary


def known(**changes):
    preset = Preset(
        about="about",
        takes="a minute",
        data="mnist",
        seeds=(0, 1),
        arms=changes.pop("arms", ARMS),
        config=None,
        floor=changes.pop("floor", None),
    )
    return Artefact(
        name="figure6",
        title="Accuracy by patch size",
        paper="Ahead for small patches.",
        presets={"small": preset},
        **changes,
    )


def write_finals(root, finals, **other):
    for seed, final in enumerate(finals):
        write_run(root, seed=seed, final=final, **other)


def test_a_row_is_over_all_runs(tmp_path):
    write_finals(tmp_path, [0.7, 0.2, 0.8, 0.6])
    [row] = summary_of(tmp_path).rows
    assert row.values == {0: 0.7, 1: 0.2, 2: 0.8, 3: 0.6}
    assert row.median == pytest.approx((0.6 + 0.7) / 2)
    assert row.mean == pytest.approx(2.3 / 4)
    assert (row.best, row.worst) == (0.8, 0.2)


def test_continued_runs_report_their_value_before_training(tmp_path):
    for seed, first in enumerate((0.1, 0.4, 0.3)):
        epochs = [epoch(0, first), epoch(1, 0.8)]
        write_run(tmp_path, seed=seed, n_iters=3, epochs=epochs, metrics={"after": "n-1"})
        write_run(tmp_path, seed=seed, n_iters=1, epochs=epochs)
    summary = summary_of(tmp_path)
    assert [row.start for row in summary.rows] == [None, 0.3]
    table = tables.results(summary)
    column = table.headings.index("before training")
    assert [row[column] for row in table.rows] == ["–", "30.00%"]


def test_a_score_is_printed_with_its_signature_and_further_scores_with_their_medians(tmp_path):
    data = {"tested": "newest", "signatures": {"bleu": "case:mixed|tok:13a", "bleu_tokenised": "tok:none"}}
    for seed, final in enumerate((30.0, 34.0)):
        last = {"epoch": 1, "test": {"bleu": final, "bleu_tokenised": final + 2.004}}
        write_run(tmp_path, seed=seed, epochs=[last], metrics={"metric": "bleu", "data": data})
    assert words.notes(summary_of(tmp_path)) == [
        "How BLEU was counted on newest: case:mixed|tok:13a.",
        "How tokenised BLEU was counted on newest: tok:none, medians 34.00 (n-1).",
    ]


def test_of_a_loss_the_lowest_is_best(tmp_path):
    write_finals(tmp_path, [0.7, 0.2], metrics={"metric": "loss"})
    [row] = summary_of(tmp_path).rows
    assert (row.best, row.worst) == (pytest.approx(1.1 - 0.7), pytest.approx(1.1 - 0.2))


def test_a_run_that_diverged_counts_as_the_worst(tmp_path):
    write_finals(tmp_path, [0.7, 0.8])
    write_run(tmp_path, seed=2, epochs=[epoch(1, math.nan)])
    summary = summary_of(tmp_path)
    [row] = summary.rows
    assert (row.median, row.best, row.worst) == (0.7, 0.8, -math.inf)
    assert dict(zip(*_first(tables.results(summary)), strict=True))["worst"] == "diverged"


@pytest.mark.parametrize("final", [math.nan, None, math.inf, -math.inf], ids=repr)
@pytest.mark.parametrize("seed", [0, 1, 2])  # at any position among the others
@pytest.mark.parametrize(
    ("metric", "median", "best", "worst"), [("loss", 0.6, 0.2, math.inf), ("bleu", 0.2, 0.6, -math.inf)]
)
def test_values_that_are_not_finite_rank_last(tmp_path, metric, median, best, worst, seed, final):
    finals = [0.2, 0.6]
    finals.insert(seed, final)
    for number, each in enumerate(finals):
        write_run(tmp_path, seed=number, epochs=[{"epoch": 1, "test": {metric: each}}], metrics={"metric": metric})
    summary = summary_of(tmp_path)
    [row] = summary.rows
    assert (row.median, row.best, row.worst, row.mean) == (median, best, worst, worst)
    assert row.values[seed] == worst
    assert dict(zip(*_first(tables.results(summary)), strict=True))["worst"] == "diverged"
    assert _first(tables.runs(summary))[1][1 + seed] == "diverged"


@pytest.mark.parametrize(("metric", "fine"), [("loss", 1e30), ("accuracy", 0.0)])
@pytest.mark.parametrize("diverged", [math.nan, None, math.inf, -math.inf], ids=repr)
def test_an_arm_that_diverged_is_worse_than_any_that_did_not(tmp_path, metric, fine, diverged):
    for patch in (7, 14):  # two comparisons: then they are counted
        for n_iters, final in ((1, fine), (3, diverged)):
            write_run(
                tmp_path,
                arm=f"{patch}-n-{n_iters}",
                patch=patch,
                n_iters=n_iters,
                epochs=[{"epoch": 1, "test": {metric: final}}],
                metrics={"metric": metric},
            )
    assert "the Sinkformer has the better median test" in (found := words.finding(summary_of(tmp_path)))
    assert "in 0, the worse in 2, the same in 0." in found


def test_a_further_score_that_diverged_is_the_worst_of_its_median(tmp_path):
    data = {"signatures": {"loss": "mean"}}
    for seed, loss in enumerate((None, 0.5, 0.7)):
        last = {"epoch": 1, "test": {"accuracy": 0.5, "loss": loss}}
        write_run(tmp_path, seed=seed, epochs=[last], metrics={"data": data})
    assert "How loss was counted: mean, medians 0.7 (n-1)." in words.notes(summary_of(tmp_path))


def _first(table):
    return table.headings, table.rows[0]


def test_overhead_is_a_ratio_of_medians_at_equal_settings(tmp_path):
    for n_iters, seconds in ((1, [[2.0, 9.0, 2.0], [4.0, 2.0]]), (3, [[3.0, 2.0, 3.0], [3.0, 9.0]])):
        for seed, each in enumerate(seconds):
            run = {"seconds_per_epoch": each}
            write_run(tmp_path, arm=f"a-{n_iters}", n_iters=n_iters, patch=7, seed=seed, run=run)
            write_run(
                tmp_path, arm=f"b-{n_iters}", n_iters=n_iters, patch=14, seed=seed, run={"seconds_per_epoch": [5]}
            )
    rows = {row.arm: row for row in summary_of(tmp_path).rows}
    assert rows["a-1"].overhead is None
    assert rows["a-3"].overhead == pytest.approx(1.5)
    assert rows["b-3"].overhead == pytest.approx(1.0)


@pytest.mark.parametrize("where", [{"threads": 2}, {"machine": MACHINE | {"cpu": "slide rule"}}, {"processes": 2}])
def test_times_from_different_environments_are_not_compared(tmp_path, where):
    write_run(tmp_path, n_iters=1)
    write_run(tmp_path, n_iters=3, run=where | {"seconds_per_epoch": [4.0]})
    assert summary_of(tmp_path).rows[1].overhead is None
    # A second seed of SoftMax in that environment makes them comparable, in that environment only.
    write_run(tmp_path, n_iters=1, seed=1, run=where | {"seconds_per_epoch": [3.2]})
    assert summary_of(tmp_path).rows[1].overhead == pytest.approx(1.25)


def test_gap_is_a_median_and_errors_are_the_worst_of_all_runs(tmp_path):
    for seed, gap in enumerate((0.0, 0.3, 0.1)):
        write_run(tmp_path, seed=seed, epochs=[epoch(0, 0.1, gap=9), epoch(1, 0.5, gap=gap, layers=("a", "b"))])
    [row] = summary_of(tmp_path).rows
    assert row.gap == pytest.approx(0.1)
    assert [layer.name for layer in row.layers] == ["a", "b"]
    assert row.layers[0].row_error == 1e-7
    assert row.error == row.layers[1].column_error == pytest.approx(0.6)


def test_column_sums_are_reported_from_before_training_on(tmp_path):
    for seed, gaps in enumerate(((0.1, 0.9, 0.4), (0.3, 0.5, 0.6), (0.2, 0.7, 0.5))):
        epochs = [epoch(number, 0.5, gap=gap) for number, gap in enumerate(gaps)]
        write_run(tmp_path, seed=seed, patch=2, arm="two-n-1", epochs=epochs)
        write_run(tmp_path, seed=seed, patch=2, arm="two-n-3", n_iters=3, epochs=epochs[::-1])
    write_run(tmp_path, patch=4, arm="four-n-1", epochs=[epoch(0, 0.1, gap=0.5), epoch(1, 0.5, gap=0.5)])
    summary = summary_of(tmp_path)
    table = tables.columns(summary)
    assert table.headings[-3:] == ("gap, epoch 0", "gap, epoch 1", "gap, end")
    assert {row[0]: row[-3:] for row in table.rows} == {
        "SoftMax, patches of 2": ("0.200", "0.700", "0.500"),
        "Sinkhorn, n_iters = 3, patches of 2": ("0.500", "0.700", "0.200"),
        "SoftMax, patches of 4": ("0.500", "0.500", "0.500"),
    }
    assert "before training in 0 of 2 models, and nearer than after the first epoch in 1." in words.trend(summary)


def test_without_columns_the_table_has_no_such_column(tmp_path):
    bare = {"epoch": 1, "test": {"accuracy": 0.5}}
    write_run(tmp_path, epochs=[bare], run={"seconds_per_epoch": []})
    summary = summary_of(tmp_path)
    assert tables.costs(summary).headings == ("model",)
    assert tables.results(summary).headings == ("model", "test accuracy")


@pytest.mark.parametrize(
    ("metric", "floor", "missed"),
    [("accuracy", 0.71, True), ("accuracy", 0.7, False), ("loss", 0.39, True), ("loss", 0.5, False)],
)
def test_the_floor_is_for_the_median_of_softmax(tmp_path, metric, floor, missed):
    # Losses are 1.1 less these.
    write_finals(tmp_path, [0.7, 0.7, 0.9], metrics={"metric": metric})
    write_finals(tmp_path, [0.1], n_iters=3, metrics={"metric": metric})
    summary = summary_of(tmp_path, known(floor=floor))
    assert [row.below_floor for row in summary.rows] == [missed, False]
    said = [note for note in words.notes(summary) if note.startswith("Not comparable yet")]
    assert len(said) == missed
    assert ("not comparable yet" in words.finding(summary)) is missed
    assert ("(below the floor)" in tables.results(summary).rows[0][0]) is missed


def test_the_papers_numbers_are_assigned_to_their_arms(tmp_path):
    write_finals(tmp_path, [0.7])
    write_finals(tmp_path, [0.8], n_iters=3)
    numbers = {"Transformer": {"median": 0.79, "best": 0.8}, "n-3": {"median": 0.795}, "n-21": {"median": 0.5}}
    summary = summary_of(tmp_path, known(paper_numbers=numbers))
    assert [row.paper for row in summary.rows] == [numbers["Transformer"], numbers["n-3"]]
    assert [row[-1] for row in tables.results(summary).rows] == ["median 79.0%, best 80.0%", "median 79.5%"]
    assert any("n-21: median 50.0%" in note for note in words.notes(summary))


def test_a_label_that_fits_two_arms_is_assigned_to_neither(tmp_path):
    write_finals(tmp_path, [0.8], n_iters=3)
    arms = (*ARMS, Arm("n-5", {"n_iters": 5}))  # of which one is still to come
    summary = summary_of(tmp_path, known(arms=arms, paper_numbers={"Sinkformer": {"median": 0.9}}))
    assert [row.paper for row in summary.rows] == [{}]
    assert any("Sinkformer: median 90.0%" in note for note in words.notes(summary))


def test_missing_runs_are_reported(tmp_path):
    write_finals(tmp_path, [0.7])
    write_unfinished(tmp_path, arm="n-3", seed=0, epochs=1)
    summary = summary_of(tmp_path, known())
    notes = words.notes(summary)
    assert "Unfinished and not in the numbers: n-3 seed 0 (1 epoch done)." in notes
    assert "Not begun: 2 runs of this preset (n-1 seed 1, n-3 seed 1)." in notes
    assert tables.runs(summary).rows == (("SoftMax", "70.00%"), ("n-3", "unfinished"))


def test_a_preset_without_a_finished_run_is_reported(tmp_path):
    write_unfinished(tmp_path, preset="paper", epochs=2)
    write_run(tmp_path, preset="small")
    paper, small = summarise(find([tmp_path]))
    assert (paper.preset, paper.rows, small.preset) == ("paper", (), "small")
    assert words.finding(paper) == "No run is finished yet."
    assert words.notes(paper) == ["Unfinished and not in the numbers: n-1 seed 9 (2 epochs done)."]


def test_one_comparison_is_reported_with_its_spread(tmp_path):
    write_finals(tmp_path, [0.7, 0.6, 0.8])
    write_finals(tmp_path, [0.75], n_iters=3)
    said = words.finding(summary_of(tmp_path))
    assert said == (
        "Median test accuracy: SoftMax 70.00% (3 runs, 60.00% to 80.00%); Sinkhorn, n_iters = 3 75.00% (1 run)."
    )


def test_several_comparisons_are_counted(tmp_path):
    finals = {(2, 1): [0.5, 0.6], (2, 3): [0.7, 0.8], (4, 1): [0.5, 0.7], (4, 3): [0.6, 0.8], (7, 1): [0.9, 0.9]}
    finals |= {(7, 3): [0.7, 0.8], (14, 1): [0.7, 0.8], (14, 3): [0.7, 0.8], (28, 3): [0.1, 0.1]}
    for (patch, n_iters), each in finals.items():
        write_finals(tmp_path, each, arm=f"{patch}-{n_iters}", patch=patch, n_iters=n_iters)
    said = words.finding(summary_of(tmp_path))
    assert "Of 4 comparisons" in said
    assert "better median test accuracy in 2, the worse in 1, the same in 1." in said
    assert said.endswith("In 2 of them every run of one arm is better than every run of the other.")


def test_runs_with_different_configs_are_reported(tmp_path):
    write_run(tmp_path, n_iters=1)
    write_run(tmp_path, n_iters=3, metrics={"config": {"recipe": {"epochs": 45, "batch": 100}}})
    assert "The runs do not share their config: epochs (2, 45)." in words.notes(summary_of(tmp_path))


def test_a_config_may_differ_in_what_settings_name(tmp_path):
    for rate, n_iters in ((0.1, 1), (0.2, 3)):
        config = {"recipe": {"rate": rate, "epochs": 2}, "n_iters": n_iters, "tied": False}
        write_run(tmp_path, arm=f"n-{n_iters}", rate=rate, n_iters=n_iters, metrics={"config": config})
    write_run(tmp_path, arm="tied", rate=0.1, tied=True, metrics={"config": config | {"tied": True}})
    summary = summary_of(tmp_path)
    assert not any("config" in note for note in words.notes(summary))
    scale = dict(tables.scale(summary).rows)
    assert scale["epochs"] == "2"
    assert not {"rate", "n_iters", "recipe", "tied"} & set(scale)


def test_different_metrics_are_refused(tmp_path):
    write_run(tmp_path, n_iters=1)
    write_run(tmp_path, n_iters=3, metrics={"metric": "loss"})
    with pytest.raises(ExperimentError, match=r"figure6, small, measure different things \(accuracy, loss\)"):
        summary_of(tmp_path)


def test_markdown_keeps_its_columns(tmp_path):
    write_run(tmp_path, note="a|b\nc")
    lines = tables.markdown(tables.runs(summary_of(tmp_path))).splitlines()
    assert lines == ["| model | seed 0 |", "| --- | --- |", "| SoftMax, note a\\|b c | 90.00% |"]


def test_comma_separated_numbers_are_unrounded(tmp_path):
    third = 1 / 3
    write_finals(tmp_path, [third, 0.5], patch=7)
    [row] = csv.DictReader(io.StringIO(tables.comma_separated(summary_of(tmp_path))))
    assert (row["arm"], row["patch"], row["n_iters"], row["runs"]) == ("n-1", "7", "1", "2")
    assert (float(row["seed 0"]), float(row["seed 1"])) == (third, 0.5)
    assert float(row["median"]) == (third + 0.5) / 2
    assert row["overhead"] == ""


def test_the_scale_names_what_was_run_with(tmp_path):
    write_run(tmp_path, seed=0)
    write_run(tmp_path, seed=1, run={"threads": 2, "finished": "2026-02-03T00:00:00"})
    scale = dict(tables.scale(summary_of(tmp_path)).rows)
    assert scale["data"] == "mnist: 600 for training, 100 for testing"
    assert (scale["epochs"], scale["threads per process"], scale["version of the source"]) == ("2", "1 or 2", "0123abc")
    assert scale["finished"] == "2026-01-01T00:00:00 to 2026-02-03T00:00:00"


def test_columns_that_a_few_normalisations_leave_uneven_are_explained(tmp_path):
    for n_iters, gaps in ((1, (0.05, 0.1)), (3, (0.0, 0.5))):
        epochs = [epoch(number, 0.5, gap=gap) for number, gap in enumerate(gaps)]
        write_run(tmp_path, n_iters=n_iters, arm=f"n-{n_iters}", epochs=epochs)
    said = " ".join(words.uneven(summary_of(tmp_path)))
    assert "With n_iters = 3 the columns of trained models are 0.50 away from 1 on average" in said
    assert "(SoftMax: 0.10; before training below 0.01)" in said
    assert "In 1 comparison SoftMax's own columns are nearer to 1" in said


def test_even_columns_need_no_explanation(tmp_path):
    for n_iters in (1, 3):
        write_run(
            tmp_path, n_iters=n_iters, arm=f"n-{n_iters}", epochs=[epoch(0, 0.1, gap=0.0), epoch(1, 0.5, gap=0.05)]
        )
    assert words.uneven(summary_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("finals", "said"),
    [
        ((0.75, 0.85), "ahead of SoftMax in 2 of 2; their ranges overlap."),
        ((0.95, 0.85), "ahead of SoftMax in 2 of 2, and its worst run is better than the best of SoftMax."),
        ((0.5, 0.8), "ahead of SoftMax in 0 of 2 and level in 1; their ranges overlap."),
    ],
)
def test_runs_of_equal_seeds_are_compared(tmp_path, finals, said):
    write_finals(tmp_path, (0.7, 0.8))
    write_finals(tmp_path, finals, n_iters=3)
    assert words.notes(summary_of(tmp_path))[0] == f"Seed by seed, n_iters = 3 is {said}"


def test_a_quick_check_is_not_shown_beside_the_paper(tmp_path):
    write_run(tmp_path, preset="smoke")
    artefact = Artefact(name="figure6", title="T", paper="Ahead.", paper_numbers={"n-1": {"median": 0.9}})
    summary = summary_of(tmp_path, artefact)
    assert summary.paper == {}
    assert summary.rows[0].paper == {}
    assert any(note.startswith("A quick check") for note in words.notes(summary))
