"""Figures show every run and the median over all of them."""

import math

import pytest

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.reporting.curves import column_sums, learning, marginal_errors
from sinkformers.lab.reporting.finals import against, final_values, swept
from sinkformers.lab.reporting.panels import SINKHORN, SOFTMAX, colours, save
from sinkformers.lab.reporting.records import find
from tests.lab.fake_runs import epoch, write_run

pytest.importorskip("matplotlib")

BOLD = 2  # points; thinner lines are single runs
FIGURES = [learning, column_sums, marginal_errors, final_values, lambda records: against(records, "n_iters")]


def visible(figure):
    return [axes for axes in figure.axes if axes.get_visible()]


def lines(axes, *, bold):
    return [line for line in axes.lines if (line.get_linewidth() > BOLD) is bold and len(line.get_xdata())]


def panel(figure, *words):
    [axes] = [axes for axes in visible(figure) if all(word in axes.get_title(loc="left") for word in words)]
    return axes


@pytest.fixture
def records(tmp_path):
    """Three seeds of two arms; of SoftMax the test accuracies after epochs 0, 1, 2 are 0.1, 0.2 or so, and `finals`."""
    for n_iters, finals in ((1, (0.5, 0.9, 0.6)), (3, (0.7, 0.8, 0.75))):
        for seed, final in enumerate(finals):
            gap = 0.8 / n_iters + 0.1 * seed
            epochs = [epoch(0, 0.1), epoch(1, 0.2), epoch(2, final, gap=gap, layers=("first", "last"))]
            write_run(tmp_path, n_iters=n_iters, seed=seed, epochs=epochs)
    return list(find([tmp_path]).records)


def test_learning_draws_every_run_and_the_median(records):
    figure = learning(records)
    titles = [axes.get_title(loc="left") for axes in visible(figure)]
    assert titles == ["train loss", "test loss", "train accuracy", "test accuracy"]
    test = panel(figure, "test accuracy")
    assert len(lines(test, bold=False)) == 6
    medians = {line.get_color(): list(line.get_ydata()) for line in lines(test, bold=True)}
    assert medians == {SOFTMAX: [0.1, 0.2, 0.6], SINKHORN[0]: [0.1, 0.2, 0.75]}


def test_training_has_no_epoch_0_and_test_has(records):
    figure = learning(records)
    assert {tuple(line.get_xdata()) for line in panel(figure, "train loss").lines} == {(1, 2)}
    assert {tuple(line.get_xdata()) for line in panel(figure, "test loss").lines} == {(0, 1, 2)}


def test_untrained_models_do_not_stretch_the_axes(tmp_path):
    wild = [epoch(0, -9), epoch(1, 0.2), epoch(2, 0.9)]
    write_run(tmp_path / "drawn", epochs=wild)
    figure = learning(find([tmp_path / "drawn"]).records)
    for quantity, drawn in (("loss", (0.1, 0.9)), ("accuracy", (0.2, 0.91))):
        low, high = panel(figure, f"test {quantity}").get_ylim()
        assert drawn[0] - 0.1 < low < drawn[0] < drawn[1] < high < drawn[1] + 0.1
    write_run(tmp_path / "trained", epochs=wild, metrics={"after": "n-1"})
    low, high = panel(learning(find([tmp_path / "trained"]).records), "test accuracy").get_ylim()
    assert low < -9 < 0.91 < high


def test_continued_runs_have_axes_of_their_own(tmp_path):
    write_run(tmp_path, rate=1, epochs=[epoch(0, 0.1), epoch(1, 0.2), epoch(2, 0.5)])
    write_run(tmp_path, rate=0.1, arm="more", epochs=[epoch(0, 0.5), epoch(1, 0.55)], metrics={"after": "n-1"})
    figure = learning(find([tmp_path]).records)
    assert panel(figure, "test accuracy", "rate 0.1").get_ylim() == pytest.approx((0.497, 0.563))
    assert panel(figure, "test accuracy", "rate 1").get_ylim() == pytest.approx((0.2 - 0.0155, 0.51 + 0.0155))


def test_each_comparison_has_its_row_of_panels(tmp_path):
    for patch in (14, 7):
        write_run(tmp_path, arm=str(patch), patch=patch)
    figure = learning(find([tmp_path]).records)
    assert [axes.get_title(loc="left") for axes in visible(figure)[3::4]] == [
        "test accuracy\npatches of 7",
        "test accuracy\npatches of 14",
    ]


def test_an_epoch_that_was_not_measured_is_skipped(tmp_path):
    epochs = [epoch(0, 0.1), epoch(1, 0.2) | {"test": {}}, epoch(2, 0.3)]
    write_run(tmp_path, epochs=epochs)
    [run] = lines(panel(learning(find([tmp_path]).records), "test accuracy"), bold=False)
    assert (list(run.get_xdata()), list(run.get_ydata())) == ([0, 2], [0.1, 0.3])


def test_a_run_that_diverged_is_not_left_out_of_the_median(tmp_path):
    for seed, final in enumerate((math.nan, 0.5, 0.7)):
        write_run(tmp_path, seed=seed, epochs=[epoch(1, 0.2), epoch(2, final)])
    [median] = lines(panel(learning(find([tmp_path]).records), "test accuracy"), bold=True)
    assert median.get_ydata()[0] == 0.2
    assert math.isnan(median.get_ydata()[1])


def test_column_sums_start_before_training_and_aim_at_1(records):
    figure = column_sums(records)
    axes = panel(figure, "SoftMax")
    outer, inner = (band.get_paths()[0].vertices for band in axes.collections)
    assert outer[:, 0].min() == inner[:, 0].min() == 0
    # The median gap of SoftMax at the end is 0.9: 5 and 95 % are at 1 ∓ 0.9, 25 and 75 % at 1 ∓ 0.45.
    assert sorted({round(y, 9) for x, y in outer if x == 2}) == [0.1, 1.9]
    assert sorted({round(y, 9) for x, y in inner if x == 2}) == [0.55, 1.45]
    assert any(list(line.get_ydata()) == [1, 1] for line in axes.lines)


def test_marginal_errors_are_logarithmic_and_by_layer(records):
    axes = panel(marginal_errors(records), "SoftMax")
    assert axes.get_yscale() == "symlog"
    medians = [list(line.get_ydata()) for line in lines(axes, bold=True)]
    assert sorted(len(each) for each in medians) == [1, 1, 2]  # of "blocks.0.attention" there are two epochs
    assert all(each[-1] == pytest.approx(1.8) for each in medians if len(each) == 1)


def test_shared_axes_cover_the_data_of_all_panels(records):
    for figure in (column_sums(records), marginal_errors(records)):
        drawn = [value for axes in visible(figure) for line in axes.lines for value in line.get_ydata()]
        for axes in visible(figure):
            low, high = axes.get_ylim()
            assert low <= min(drawn) <= max(drawn) <= high


def test_against_a_setting_there_is_a_line_per_n_iters_and_a_panel_per_other_setting(tmp_path):
    for rate in (0.001, 0.002):
        for patch in (2, 14, 7):
            for n_iters in (1, 3):
                for seed, noise in enumerate((0, 0.1, -0.2)):
                    arm, final = f"{rate}-{patch}-{n_iters}", 0.5 + rate * patch * n_iters + noise
                    write_run(tmp_path, arm=arm, rate=rate, patch=patch, n_iters=n_iters, seed=seed, final=final)
    figure = against(find([tmp_path]).records, "patch")
    assert len(visible(figure)) == 2
    axes = panel(figure, "rate 0.002")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "7", "14"]
    medians = {line.get_color(): list(line.get_ydata()) for line in lines(axes, bold=True)}
    assert medians[SOFTMAX] == pytest.approx([0.504, 0.514, 0.528])
    assert medians[SINKHORN[0]] == pytest.approx([0.512, 0.542, 0.584])
    assert [len(line.get_xdata()) for line in lines(axes, bold=False)] == [9, 9]


def test_final_values_have_a_dot_for_every_run(records):
    [axes] = final_values(records).axes
    dots = [list(line.get_xdata()) for line in axes.lines]
    assert dots == [[0.5, 0.9, 0.6], [0.6], [0.7, 0.8, 0.75], [0.75]]


def test_swept_is_the_setting_with_most_numbers(tmp_path):
    for patch in (2, 4, 7):
        for n_iters in (1, 3):
            for readout in ("cls", "mean"):
                arm = f"{patch}-{n_iters}-{readout}"
                write_run(tmp_path, arm=arm, patch=patch, n_iters=n_iters, readout=readout)
    records = find([tmp_path]).records
    assert swept(records) == "patch"
    assert swept(record for record in records if record.metrics["settings"]["patch"] != 2) is None


def test_each_n_iters_has_its_own_colour():
    assert colours([3, 1]) == {1: SOFTMAX, 3: SINKHORN[0]}
    assert len(set(colours([1, 3, 5, 11, 21]).values())) == 5


@pytest.mark.parametrize("figure", [learning, column_sums, marginal_errors])
def test_a_figure_without_numbers_says_so(tmp_path, figure):
    write_run(tmp_path, metrics={"metric": "points"}, epochs=[{"epoch": 0, "test": {"points": 1}}])
    with pytest.raises(ExperimentError, match="no run holds"):
        figure(find([tmp_path]).records)


def test_against_a_setting_that_no_run_has_says_so(records):
    with pytest.raises(ExperimentError, match="no run has the setting depth"):
        against(records, "depth")


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_equal_figures_are_equal_files(tmp_path, records, suffix):
    for name in ("one", "two"):
        save(learning(records), tmp_path / f"{name}{suffix}")
    one, two = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert b"dc:date" not in one


def test_a_name_with_a_dollar_sign_is_no_formula(tmp_path):
    epochs = [epoch(0, 0.5, layers=(r"$\frac{",)), epoch(1, 0.6, layers=(r"$\frac{",))]
    for n_iters in (1, 3):
        write_run(tmp_path, arm=f"a-{n_iters}", n_iters=n_iters, readout=r"$\frac{$", epochs=epochs)
    for number, figure in enumerate(FIGURES):
        save(figure(find([tmp_path]).records), tmp_path / f"{number}.svg")
