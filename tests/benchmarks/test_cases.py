"""Masks of the scores and half precision: what a row is compared with, and how far off it may be."""

import pytest
import torch

from benchmarks import agreement
from benchmarks import case as cases
from benchmarks.case import BAND, MASKS, TRAINED_BIAS, VALID, Case, draw, with_known_answer
from benchmarks.rows import ROWS, Row
from benchmarks.rows.row import of_torch
from benchmarks.suites import operator_entries
from benchmarks.suites.entries import attention_entry
from benchmarks.suites.operator_entries import operator_entry
from sinkformers.kernels import native
from tests.benchmarks.test_contest import WrongGradient, contest

SDPA = ROWS["sdpa"]
NATIVE = pytest.param("native", marks=pytest.mark.skipif(bool(native.missing()), reason=str(native.missing())))


def masked(mask, **options):
    return Case(2, 3, 41, 8, mask=mask, **options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", ["sdpa", NATIVE, "torch", "reference"])
def test_rows_agree_under_every_mask(name, mask, backward):
    row, case = ROWS[name], masked(mask, n_iters=1 if name == "sdpa" else 5, backward=backward)
    assert agreement.check_attention(case, row.prepare, row.formula).deviation < 1e-5


def test_masks_have_the_shapes_and_entries_that_they_are_named_for():
    bias, trained, window, band, triangle = (draw(Case(2, 3, 200, mask=mask)).masks.scores for mask in MASKS)
    assert triangle is None  # calls get it as is_causal
    assert bias.shape == trained.shape == (1, 3, 200, 200)
    assert bias.is_floating_point()
    assert window.shape == band.shape == (2, 1, 200, 200)
    assert window.float().mean().item() == pytest.approx(VALID, abs=0.01)
    assert band[1, 0, 100].nonzero().flatten().tolist() == list(range(100 - BAND, 100 + BAND + 1))


def test_only_a_trained_bias_has_a_gradient():
    def count(mask):
        step = SDPA.prepare(draw(masked(mask)))
        step.call()
        return len(step.outcome())

    assert [count(mask) for mask in MASKS] == [5 if mask == TRAINED_BIAS else 4 for mask in MASKS]


def test_a_wrong_gradient_of_the_bias_is_refused():
    def attention(query, key, value, _case, masks):
        bias = WrongGradient.apply(masks.scores)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, bias)

    bad = Row("bad", "bad", of_torch(attention), formula="softmax")
    results = contest(attention_entry(SDPA, masked(TRAINED_BIAS)), attention_entry(bad, masked(TRAINED_BIAS)))
    assert (results["sdpa"].status, results["bad"].status) == ("timed", "refused")


def test_a_mask_of_the_scores_is_never_repeated(monkeypatch):
    monkeypatch.setattr(cases, "LARGEST_DIRECT", 17)
    with pytest.raises(ValueError, match="needs n ≤ 17; got n = 34"):
        with_known_answer(Case(1, 1, 34, mask=MASKS[0]))


def test_an_unknown_mask_is_named():
    with pytest.raises(ValueError, match=r"mask must be one of .*; got 'windows'"):
        draw(masked("windows"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_may_be_off_by_twice_what_eager_softmax_is(dtype):
    case = Case(2, 3, 41, 8, n_iters=5, dtype=dtype)
    eager = agreement.check_attention(case, ROWS["softmax"].prepare, "softmax")
    assert eager.tolerance == 2 * eager.deviation
    unit = torch.finfo(getattr(torch, dtype)).eps
    assert unit / 4 < eager.deviation < 16 * unit
    got = agreement.check_attention(case, ROWS["torch"].prepare, "sinkhorn")
    assert got.tolerance == eager.tolerance
    assert got.deviation < got.tolerance


def test_half_precision_beyond_its_tolerance_is_refused():
    def attention(query, key, value, _case, _masks):
        return 1.1 * torch.nn.functional.scaled_dot_product_attention(query, key, value)

    case = Case(2, 3, 41, 8, dtype="bfloat16")
    bad = Row("bad", "bad", of_torch(attention), formula="softmax")
    results = contest(attention_entry(SDPA, case), attention_entry(bad, case))
    assert (results["sdpa"].status, results["bad"].status) == ("timed", "refused")


@pytest.mark.parametrize("n_iters", [1, 3, 4])
def test_repeated_rows_and_columns_know_their_weights_and_gradients(monkeypatch, n_iters):
    """12 × 12 made of 4 × 4, where the reference can still compute the whole."""
    monkeypatch.setattr(operator_entries, "LARGEST_DIRECT", 2 * 4 * 4)
    operator_entries.expected.cache_clear()
    shape = (2, 12, 12)
    assert operator_entries.copies(shape) == 3
    got = operator_entry("reference", operator_entries.backend("reference"), shape, n_iters).check()
    assert got.deviation < 1e-5
    wrong = operator_entry("wrong", operator_entries.backend("reference"), shape, n_iters)
    monkeypatch.setattr(operator_entries, "copies", lambda _shape: 2)
    operator_entries.expected.cache_clear()
    monkeypatch.setattr(operator_entries, "with_known_answer", lambda _shape: (*operator_entries.draw(shape), 2))
    assert wrong.check().deviation > 1e-2
    operator_entries.expected.cache_clear()
