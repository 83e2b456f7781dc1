"""The fuzzer itself: that it finds nothing here, that it would find something, and what it makes of it."""

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from fuzzing import bounds, causal_bounds, causal_oracle, judge, oracle
from fuzzing.case import BACKENDS, Case
from fuzzing.child import Child
from fuzzing.command import summary
from fuzzing.draw import draw
from fuzzing.judgement import Verdict
from fuzzing.shrink import features, shrink
from fuzzing.snippet import snippet
from tests import causal_oracle as loops
from tests import oracle as other


def test_a_short_run_finds_nothing():
    command = [sys.executable, "-m", "fuzzing", "--cases", "250", "--seconds", "60", "--seed", "0", "--no-compile"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "0 failed" in run.stdout


def test_a_seed_is_a_case():
    for seed in range(300):
        case = draw(seed, BACKENDS)
        assert case == draw(seed, BACKENDS)
        assert Case.from_json(case.to_json()) == case


def test_every_function_layout_and_transform_is_drawn():
    cases = [draw(seed, BACKENDS) for seed in range(4000)]
    assert {case.backend for case in cases} == set(BACKENDS)
    assert {case.function for case in cases} >= {*judge.MODULES, "sinkhorn", "sinkhorn_attention", "sinkhorn_limit"}
    assert {case.transform.partition(":")[0] for case in cases} == {
        *("plain", "vmap", "vmap_vjp", "jacrev", "checkpoint", "compile")
    }
    assert {len(case.lead) + 2 for case in cases} >= {2, 3, 4, 5, 6}
    assert any(0 in (case.n, case.m, case.d, case.e) for case in cases)
    for function in ("sinkhorn_attention", "causal_sinkhorn"):
        assert {case.order for case in cases if case.function == function} >= {"streaming", "prefix"}
    assert {case.causal for case in cases if case.chunks} == {True, False}


def test_enough_small_matrices_are_drawn_for_lanes():
    """More than 16 rows or columns, up to 64, and at least one matrix for every lane of all threads."""
    vectors = {"native:baseline": 16, "native:avx2": 32, "native:avx512": 64, "native:avx512_bf16": 64}
    found = Counter()
    for seed in range(4000):
        case = draw(seed, list(vectors), ["sinkhorn"], compiles=False)
        lanes = vectors[case.backend] // (8 if case.dtype == "float64" else 4)
        small = 16 < max(case.n, case.m) <= 64 and case.row_mass is None and case.col_mass is None
        found[case.backend] += small and math.prod(case.lead) >= lanes * case.threads
    assert min(found[name] for name in vectors) >= 60


@pytest.mark.parametrize("n_iters", [1, 2, 5, 6])
def test_two_oracles_agree(n_iters):
    """The one of the tests deletes what is masked, matrix by matrix; this one fills, all at once."""
    scores = 3 * torch.randn(2, 3, 5, 7, dtype=torch.float64)
    mask, tau = torch.rand(2, 3, 5, 7) < 0.7, torch.rand(2, 3, dtype=torch.float64)
    row_mass = torch.rand(5, dtype=torch.float64).softmax(0)
    run = oracle.iterate(scores, mask, n_iters, tau, row_mass=row_mass.expand(2, 3, 5))
    assert_close(run.weights, other.batch_weights(scores, n_iters, tau, mask, row_mass), rtol=0, atol=1e-13)


def compare_gradients(run, scores, rules, *, atol):
    d_weights = torch.randn(scores.shape, dtype=torch.float64)
    (grad,) = torch.autograd.grad(run.weights, scores, d_weights)
    with torch.no_grad():
        rounding = bounds.Rounding.of(torch.float32)
        known = rules.forward(run, torch.zeros_like(scores), rounding)
        back = rules.backward(run, known, d_weights, d_weights.abs(), rounding)
    assert_close(back.scores, grad, rtol=0, atol=atol)


@pytest.mark.parametrize("n_iters", [1, 4, 7])
def test_the_gradient_that_bounds_are_derived_from_is_autograds(n_iters):
    scores = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    tau = torch.rand(2, dtype=torch.float64)
    run = oracle.iterate(scores, torch.rand(2, 5, 7) < 0.8, n_iters, tau)
    compare_gradients(run, scores, bounds, atol=1e-14)


@pytest.mark.parametrize("definition", ["streaming", "prefix"])
@pytest.mark.parametrize("n_iters", [1, 3, 7])
def test_two_causal_oracles_agree(n_iters, definition):
    """The one of the tests loops over numbers. The gradient that bounds are derived from is autograd's."""
    scores = 3 * torch.randn(2, 6, 6, dtype=torch.float64)
    mask, tau = torch.rand(2, 6, 6) < 0.7, torch.rand(2, dtype=torch.float64)
    mask[0, 2] = mask[1, :, 3] = False
    leaf = scores.requires_grad_()
    run = causal_oracle.iterate(leaf, mask, n_iters, tau, definition)
    exact = loops.weights(scores, n_iters, tau, mask, definition)
    assert_close(run.weights.detach(), exact, rtol=0, atol=1e-13)
    compare_gradients(run, leaf, causal_bounds, atol=1e-13)


def test_the_implicit_gradient_is_that_of_many_iterations():
    scores = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    tau = torch.tensor(0.8, dtype=torch.float64)
    run = oracle.iterate(scores, torch.ones(4, 6, dtype=torch.bool), 301, tau)
    d_weights = torch.randn(4, 6, dtype=torch.float64)
    (grad,) = torch.autograd.grad(run.weights, scores, d_weights)
    weights = run.weights.detach()
    assert_close(oracle.implicit_gradient(weights, d_weights, *oracle.fixed_point_system(weights, tau)), grad)


@pytest.mark.parametrize("definition", ["", "streaming"])
@pytest.mark.parametrize("name", ["out", "d_query", "d_key", "d_value", "d_attn_mask", "d_tau"])
def test_a_small_error_is_an_error(monkeypatch, name, definition):
    """One part in a thousand in one entry, in float32; the results themselves pass."""
    case = Case(lead=(2,), n=5, m=4, d=3, e=2, n_iters=3, tau="heads", attn_mask="float32", definition=definition)
    assert judge.judge(case).complaint == ""
    compare = judge.compare

    def spoiled(results, expected):
        off = results[name].detach().clone()
        off.view(-1)[off.abs().argmax()] *= 1.001
        return compare({**results, name: off}, expected)

    monkeypatch.setattr(judge, "compare", spoiled)
    verdict = judge.judge(case)
    assert verdict.kind == f"{name} wrong"
    assert verdict.witness is not None
    assert verdict.witness[0] == name


def test_a_tensor_on_another_device_must_be_named():
    case = Case(lead=(2,), n=3, m=3, device="key")
    assert judge._refused(case, ValueError("sinkhorn_attention: key must be on cpu, as query is; got meta.")).kind == ""
    assert judge._refused(case, RuntimeError("Tensor on device meta is not on the expected device cpu!")).complaint


def test_a_failure_is_reduced_to_what_it_needs():
    case = draw(7, ["torch"], ["sinkhorn_attention"])
    case = replace(case, lead=(2, 3), n=13, m=7, layouts={"query": "negative", "key": "transposed"}, transform="plain")

    def ask(case):
        bad = case.n >= 3 and case.layouts.get("query") == "negative"
        return Verdict("wrong", "out wrong", ("out", [0, 0], 1.0)) if bad else Verdict()

    small, verdict = shrink(case, ask(case), ask)
    assert (small.n, small.m, small.lead, small.layouts) == (3, 1, (), {"query": "negative"})
    assert features(small) == (("layouts", ("negative",)),)
    text = snippet(small, verdict)
    assert "torch._neg_view" in text
    assert "fuzzing" not in text
    compile(text, "snippet", "exec")


def test_a_crash_is_survived_and_reported():
    child = Child()
    killer = Case(dtype='float32) if __import__("os").abort() else torch.ones(1')
    verdict = child.ask(killer)
    assert verdict.kind == "crash: SIGABRT"
    assert child.ask(Case()).complaint == ""
    child.stop()


def test_the_summary_counts():
    from fuzzing.command import Tally

    tally = Tally()
    tally.note(Case(), Verdict(ratios={"out": 0.25}))
    tally.note(Case(), Verdict("wrong", "out wrong"))
    assert "2 (1)" in summary(tally)
    assert "2 cases, 1 failed" in summary(tally)
