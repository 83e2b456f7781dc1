"""One table describes the metrics: a metric that is added there is printed, ranked and drawn everywhere."""

import ast
import math
from pathlib import Path

import pytest

from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.artefacts.catalogue import ARTEFACTS
from sinkformers.lab.reporting import metrics, tables, words
from sinkformers.lab.reporting.curves import learning
from sinkformers.lab.reporting.finals import final_values
from sinkformers.lab.reporting.metrics import METRICS, Metric, metric_named
from sinkformers.lab.reporting.records import find
from sinkformers.lab.reporting.summary import summarise
from sinkformers.lab.workbench.display import _metrics
from tests.lab.fake_runs import write_run


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Runs that measure a metric which only the table knows."""
    metric = Metric(name="toy", label="toy share", unit="%", higher_is_better=False, decimals=1, paper_decimals=0)
    monkeypatch.setitem(METRICS, "toy", metric)
    for n_iters, finals in ((1, (0.5, 0.3)), (3, (0.25, 0.125))):
        for seed, final in enumerate(finals):
            epochs = [{"epoch": k, "test": {"toy": value}} for k, value in enumerate((0.9, final))]
            write_run(tmp_path, n_iters=n_iters, seed=seed, epochs=epochs, metrics={"metric": "toy"})
    return find([tmp_path])


def summary_of(found, **changes):
    arms = (Arm("n-1", {"n_iters": 1}), Arm("n-3", {"n_iters": 3}))
    preset = Preset(about="", takes="", arms=arms, **changes)
    artefact = Artefact(
        name="figure6", title="", paper="", presets={"small": preset}, paper_numbers={"n-1": {"best": 0.1}}
    )
    [summary] = summarise(found, lambda _name: artefact)
    return summary


def test_a_metric_in_the_table_is_printed_and_ranked(toy):
    summary = summary_of(toy, floor=0.35)
    softmax, sinkformer = summary.rows
    assert (softmax.best, softmax.worst, sinkformer.best, sinkformer.worst) == (0.3, 0.5, 0.125, 0.25)
    table = tables.results(summary)
    assert dict(zip(table.headings, table.rows[0], strict=True)) == {
        "model": "SoftMax (below the floor)",
        "runs": "2",
        "median": "40.0%",
        "mean": "40.0%",
        "best": "30.0%",
        "worst": "50.0%",
        "the paper": "best 10%",
    }
    assert "SoftMax must reach a test toy share of 35.0%" in words.notes(summary)[0]
    assert tables.comma_separated(summary).splitlines()[1].startswith("n-1,1,toy,2,")
    assert words.finding(summary_of(toy)).startswith("Median test toy share: SoftMax 40.0% (2 runs, 30.0% to 50.0%);")


def test_a_metric_in_the_table_is_drawn(toy):
    [axes] = learning(toy.records).axes
    assert axes.get_title(loc="left") == "test toy share"
    assert axes.yaxis.get_major_formatter()(0.5) == "50.0%"
    assert final_values(toy.records).axes[0].get_xlabel() == "test toy share"


@pytest.mark.usefixtures("toy")
def test_a_metric_in_the_table_is_displayed_while_training():
    assert _metrics({"train": {}, "test": {"toy": 0.25}}) == ", test toy share 0.25"


def test_values_are_printed_with_their_digits_and_unit():
    assert METRICS["accuracy"].text(0.93756) == "93.76%"
    assert METRICS["accuracy"].paper_text(0.79) == "79.0%"
    assert METRICS["bleu"].text(34.4) == METRICS["bleu"].paper_text(34.4) == "34.40"
    assert METRICS["loss"].text(0.123456) == "0.1235"
    assert {METRICS["loss"].text(value) for value in (math.nan, math.inf, -math.inf)} == {"diverged"}


def test_a_metric_that_is_not_in_the_table_is_printed_as_it_is():
    unknown = metric_named("points")
    assert (unknown.label, unknown.text(3.14159), unknown.best([1.0, 2.0])) == ("points", "3.142", 2.0)


@pytest.mark.parametrize("artefact", [each for each in ARTEFACTS if each.task], ids=lambda each: each.name)
def test_the_metrics_of_the_catalogue_are_in_the_table(artefact):
    assert {artefact.metric_of(preset) for preset in artefact.presets} <= METRICS.keys()


def test_no_other_file_of_reporting_names_a_metric():
    folder = Path(metrics.__file__).parent
    named = {
        (file.name, node.value)
        for file in folder.glob("*.py")
        if file.name != "metrics.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in METRICS.keys() - {"error"}
    }
    assert named == set()  # `error` is also a column of marginal errors
