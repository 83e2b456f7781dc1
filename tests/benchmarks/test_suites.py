"""Suites and the command: what is asked for is what runs."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import agreement, peak
from benchmarks.case import Case
from benchmarks.command import main
from benchmarks.measurement import Measurement
from benchmarks.rows import ROWS
from benchmarks.settings import Settings
from benchmarks.steps import Unavailable
from benchmarks.suites import QUICK, SUITES, operator, scaling
from benchmarks.suites.entries import SECONDS, SHAPES
from benchmarks.suites.operator_entries import operator_entry
from benchmarks.summary import spread
from tests.benchmarks.fake import Silent

DOCS = Path(__file__).parents[2] / "docs"


def test_shapes_are_what_their_labels_say():
    assert all(case.label == label for label, case in SHAPES.items())
    assert {case.n for case in SHAPES.values()} == set(SECONDS)


def test_every_suite_has_its_place_on_the_page():
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert all(f"<!-- benchmark: {name} -->" in text for name in [*SUITES, "targets"])


def test_sdpa_is_timed_whichever_rows_are_chosen():
    assert [row.name for row in Settings(rows=("native",)).pick(ROWS)] == ["sdpa", "native"]
    assert {"geomloss", "keops", "ott"}.isdisjoint(row.name for row in Settings(quick=True).pick(ROWS))
    assert len(Settings().pick(ROWS)) == len(ROWS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["atention"], "no suite is called 'atention'.*Did you mean attention"),
        (["--rows", "natve"], "no row is called 'natve'.*Did you mean native"),
        (["--threads", "0"], "--threads must be ≥ 1"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_remedy(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_quick_suites_exist():
    assert set(QUICK) <= set(SUITES)


def fake_times(suite, row, points):
    return [
        Measurement(suite, "s", row, "timed", n_iters=x, n=x, seconds=spread([y]), peak_bytes=7 * x) for x, y in points
    ]


def test_iterations_that_cost_as_much_as_the_first_have_slope_one():
    (fit,) = operator.slope("native", fake_times("operator", "native", [(x, 2.0 * x) for x in (1, 3, 21)]), Silent())
    assert fit.fit == pytest.approx({"seconds per iteration": 2.0, "slope": 1.0})


def test_iterations_that_cost_a_tenth_of_the_first_have_slope_a_tenth():
    times = fake_times("operator", "native", [(x, 0.9 + 0.1 * x) for x in (1, 3, 21)])
    (fit,) = operator.slope("native", times, Silent())
    assert fit.fit["slope"] == pytest.approx(0.1)


def test_growth_is_fitted_where_n_is_large():
    times = fake_times("scaling", "native", [(n, max(1.0, 1e-3 * n**2)) for n in (2, 4, 8, 256, 512, 1024, 2048)])
    (fit,) = scaling._fits("native", times, Silent())
    assert fit.fit == pytest.approx({"time exponent": 2.0, "memory exponent": 1.0})


def test_a_size_too_large_for_the_time_is_left_out_with_its_reason():
    rows = [ROWS[name] for name in ("sdpa", "native")]
    results = [*fake_times("scaling", "sdpa", [(4096, 10.0)]), *fake_times("scaling", "native", [(4096, 10.0)])]
    kept, out = scaling._affordable(rows, results, Case(1, 1, 8192), left=1000.0)
    assert [row.name for row in kept] == ["native"]  # ours may take its time while there is some
    assert [(m.row, m.n, m.reason) for m in out] == [
        ("sdpa", 8192, "a call would take about 45 s, too long for this suite")
    ]
    assert scaling._affordable(rows, results + out, Case(1, 1, 16384), left=100.0)[0] == []
    assert scaling._last_seconds("sdpa", results + out) == 45.0


@pytest.mark.parametrize("name", list(operator.TINY_ROWS)[2:])
def test_the_operator_is_compared_too(name):
    got = operator_entry(name, operator.TINY_ROWS[name], (7, 4, 4), 20)
    assert got.check().deviation < 1e-5
    assert operator_entry(name, lambda x, _n: x.softmax(-1), (7, 4, 4), 20).check().deviation > 1e-2


def test_peak_memory_sees_what_a_step_allocates():
    """16 matrices of 512 × 512 in float32 are 16 MiB; eager SoftMax holds several of them at once."""
    case = Case(2, 8, 512, 16, n_iters=1)
    count = peak.measure("softmax", case, threads=1)
    assert 2 * 16 * 2**20 < count < 8 * 16 * 2**20


def test_peak_memory_of_a_row_that_cannot_serve_has_its_reason():
    with pytest.raises(Unavailable, match="has no mask"):
        peak.measure("log-loop", Case(1, 1, 512, 16, padding=0.5), threads=1)


def test_a_training_step_starts_from_the_same_model():
    from benchmarks.suites.training import MODELS, _step

    first, second = (_step(name, MODELS["ViT"]).model for name in ("sdpa", "torch"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("name", ["Swin", "BEiT", "T5 encoder"])
def test_models_with_relative_positions_are_converted(name):
    """With one iteration a converted model is the original, with three it is another."""
    pytest.importorskip("transformers")
    from benchmarks.suites import conversion

    model = conversion.MODELS[name]
    original, converted = (conversion.ModelStep(model, n_iters, training=False) for n_iters in (None, 3))
    biases = [p for key, p in original.model.named_parameters() if "relative" in key]
    assert biases
    for step in (original, converted):
        for key, parameter in step.model.named_parameters():
            if "relative" in key:  # some models start from zeros
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(key)))
        step.call()
    off = agreement.deviation(converted.outcome(), original.outcome())
    assert off > agreement.TOLERANCE
    assert conversion.model_entry(model, 1, training=False).check().deviation < agreement.TOLERANCE
