"""The smoke preset of the theory: every result, the record and the page."""

import json
import math
import re
from dataclasses import asdict

import pytest
import torch

from sinkformers.flows import Bump
from sinkformers.lab.artefacts.theory import THEORY
from sinkformers.lab.theory import study, sweep
from sinkformers.lab.theory.equations import particle_density

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def found():
    return study.run(study.SMOKE)


def test_proposition_1_holds_for_sinkhorn_and_fails_for_softmax(found):
    assert max(found.proposition1.changes.column("Sinkhorn")) < 1e-12
    by_row, by_column, *_ = found.proposition1.changes.column("SoftMax")
    assert by_row < 1e-14
    assert by_column > 0.1


def test_proposition_2_holds_to_rounding(found):
    assert max(found.proposition2.identities.column("largest difference")) < 1e-10
    assert all(order == pytest.approx(-4, abs=0.2) for order in found.proposition2.decay.orders.values())
    assert min(found.proposition2.softmax_gap.column("gap")) > 0.01


def test_proposition_3_sets_softmax_apart(found):
    for sign in ("Jacobian's asymmetry", "work around a loop"):
        nothing, softmax, sinkhorn = found.proposition3.signs.column(sign)
        assert max(nothing, sinkhorn) < 1e-12
        assert softmax > 1e-4
    assert min(found.proposition3.second_variation.column("asymmetry")) > 0.1


def test_theorem_1_has_the_constant_one_half(found):
    assert found.theorem1.constant == pytest.approx(0.5, abs=1e-3)
    assert found.theorem1.constant_of_gaussian == pytest.approx(0.5, abs=1e-5)
    assert found.theorem1.constants.column("SoftMax")[-1] > 0.9
    for each in found.theorem1.by_eps[:3]:
        assert each.orders["Sinkhorn inside"] == pytest.approx(1, abs=0.15)
        assert each.orders["Sinkhorn"] == pytest.approx(0.6, abs=0.1)  # the boundary
        paper = each.column("Sinkhorn inside, paper's limit")
        assert paper[-1] > 5 * each.column("Sinkhorn inside")[-1]
    assert found.theorem1.by_eps[3].column("quadrature − closed form")[0] < 1e-6


def test_particles_on_a_grid_beat_samples(found):
    grid, _, plane = found.theorem1.by_particles
    assert grid.column("Sinkhorn")[-1] < 1e-7
    assert plane.orders["Sinkhorn"] == pytest.approx(-0.5, abs=0.2)


def test_proposition_4_has_the_transposed_inverse(found):
    measured, closed, limit, paper = (
        torch.tensor(vector)
        for vector in (
            found.proposition4.measured,
            found.proposition4.closed_form,
            found.proposition4.limit,
            found.proposition4.paper,
        )
    )
    assert (measured - closed).norm() < 1e-5
    assert (measured - limit).norm() < 1e-3
    assert (measured - paper).norm() > 1
    line, plane, general = found.proposition4.by_eps
    assert line.orders["limit"] == pytest.approx(1, abs=0.1)
    for each in (plane, general):
        assert each.column("the paper's limit")[-1] > 3 * each.column("limit")[-1]


def test_particles_follow_their_equations(found):
    heat = found.equations.heat
    assert heat.orders["Sinkhorn, ½Δρ"] == pytest.approx(1, abs=0.25)
    assert heat.orders["SoftMax, Δρ"] == pytest.approx(1, abs=0.25)
    assert heat.column("Sinkhorn, Δρ")[-1] > 50 * heat.column("Sinkhorn, ½Δρ")[-1]
    transformer = found.equations.transformer
    assert transformer.column("the paper's W_K⁻¹")[-1] > 2 * transformer.column("W_K⁻ᵀ")[-1]


def test_the_other_results_are_as_expected(found):
    assert all(o == pytest.approx(1, abs=0.25) for each in found.first_order.by_eps for o in each.orders.values())
    assert found.high_dimension.by_eps.orders["Sinkhorn"] == pytest.approx(1, abs=0.02)
    assert found.high_dimension.blind_from == 0.25
    spread = found.regimes.spread
    last = dict(zip(spread.columns, spread.rows[-1], strict=True))
    assert last["T^∞, W_V = −1"] < 0.5 < 1 < last["T̄^∞, W_V = −1"] < last["T̄¹, W_V = −1"]
    assert last["T̄^∞, W_V = +1"] < 1 < last["T^∞, W_V = +1"]
    assert last["T̄^∞, W_V = −1"] == pytest.approx(last["½Δρ"], abs=0.05)
    energies = found.regimes.contraction.column("F^∞")
    assert energies == sorted(energies, reverse=True)
    # A Gaussian of variance s ≪ ε has ds/dt = −2s²/ε², so s → ε²/2t.
    t, variance = (found.regimes.contraction.column(name)[-1] for name in ("t", "variance"))
    assert variance == pytest.approx(0.4**2 / (2 * t), rel=0.1)


def test_depth_and_counts(found):
    orders = found.deep_limit.by_depth.orders
    assert orders.pop("limit, Heun") == pytest.approx(-2, abs=0.25)
    assert all(order == pytest.approx(-1, abs=0.15) for order in orders.values())
    errors = found.unconverged.by_count.column("distance from T^∞")
    for each in (errors[:4], errors[4:8], errors[8:]):
        assert each == sorted(each, reverse=True)
    collapse = found.rank_collapse.by_depth
    assert max(collapse.column("SoftMax, no skip")[-1], collapse.column("Sinkhorn, no skip")[-1]) < 1e-12
    assert min(v for name in collapse.columns[3:] for v in collapse.column(name)) > 0.5


def test_the_record_is_plain_json(found):
    record = json.loads(json.dumps(asdict(found)))
    assert {"constant", "constants", "by_eps", "by_particles"} <= record["theorem1"].keys()
    assert {"measured", "limit", "paper"} <= record["proposition4"].keys()
    assert all(math.isfinite(x) for x in record["proposition4"]["measured"])


def test_the_page_is_self_contained(found, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "run", lambda *_, **__: found)
    said = study.make(THEORY.presets["smoke"], tmp_path)
    assert "0.5000" in said
    assert json.loads((tmp_path / "theory.json").read_text())["theorem1"]["constant"] == found.theorem1.constant
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert text.count("<img") == 6
    for section in study.Study.__dataclass_fields__:
        assert f'id="{section}"' in text
    for each in found.theorem1.by_eps:
        assert each.title.replace("'", "&#39;") in text


def test_orders_and_extrapolation():
    x = [0.4, 0.2, 0.1, 0.05]
    assert sweep.fitted_order(x, [3 * v**1.5 for v in x]) == pytest.approx(1.5)
    assert sweep.extrapolated(x, [0.5 + v - 2 * v**2 + 3 * v**3 for v in x]) == pytest.approx(0.5)
    table = sweep.sweep("t", "n", ("ε", "a", "b"), [(v, v**2, "x") for v in x], fitted=("a",))
    assert table.orders == {"a": pytest.approx(2)}
    assert table.column("a") == [v**2 for v in x]


def test_the_density_of_particles_on_a_line():
    measure = Bump(4, 1).quadrature(401)
    shuffled = measure.points.flip(0)
    x, density = particle_density(type(measure)(shuffled, measure.weights.flip(0)))
    assert (density - Bump(4, 1).log(x[:, None]).exp()).abs().max() < 1e-3
