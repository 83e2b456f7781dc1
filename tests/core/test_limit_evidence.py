"""What `sinkhorn_limit` says about itself: residual, iterations, converged, and the one warning."""

import inspect
import warnings

import pytest
import torch
from torch.testing import assert_close

from sinkformers import ConvergenceWarning, marginal_error, sinkhorn, sinkhorn_limit
from sinkformers.core import kernel_domain
from sinkformers.core.limit_iteration import tolerance_floor


def test_evidence():
    scores = torch.tensor([0.1, 1.0, 4.0])[:, None, None] * torch.randn(3, 17, 13)
    weights, info = sinkhorn_limit(scores, tol=1e-5, max_iters=3001, return_info=True)
    rows, cols = marginal_error(weights)
    assert info.converged.all()
    assert (info.iterations % 2 == 1).all()
    assert info.iterations[0] < info.iterations[1] < info.iterations[2]
    assert (info.residual <= 1e-5).all()
    assert_close(torch.maximum(rows, cols / (17 / 13)), info.residual, atol=2e-6, rtol=0)


def test_not_converging_is_one_warning_with_the_residual():
    scores = 4 * torch.randn(3, 17, 17)
    with pytest.warns(
        ConvergenceWarning, match=r"3 of 3 matrices .* after 5 products; the largest residual is"
    ) as seen:
        weights = sinkhorn_limit(scores, max_iters=5)
    assert len(seen) == 1
    assert_close(weights, sinkhorn(scores, n_iters=5), atol=1e-5, rtol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, info = sinkhorn_limit(scores, max_iters=6, return_info=True)
    assert not info.converged.any()
    assert info.iterations.eq(5).all()


def test_the_warning_counts_those_that_did_not_converge():
    scores = torch.stack([torch.zeros(5, 5), 5 * torch.randn(5, 5)])
    with pytest.warns(ConvergenceWarning, match="1 of 2 matrices"):
        sinkhorn_limit(scores, max_iters=5)
    _, info = sinkhorn_limit(scores, max_iters=5, return_info=True)
    assert info.converged.tolist() == [True, False]
    assert (info.residual <= 1e-6).equal(info.converged)


def test_a_limit_that_does_not_exist_reports_its_residual():
    two_columns = torch.ones(6, 6).bool()
    two_columns[:3, 2:] = False  # three rows share two columns
    weights, info = sinkhorn_limit(torch.randn(6, 6), mask=two_columns, max_iters=1001, return_info=True)
    assert not info.converged
    assert 0.1 < info.residual < 1
    assert weights.isfinite().all()


def test_nan_stops_at_once_and_stays_where_it_takes_part():
    scores = torch.randn(2, 5, 7)
    scores[0, 1, 2] = torch.nan
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[3] = False
    weights, info = sinkhorn_limit(scores, mask=mask, return_info=True)
    assert info.iterations[0] == 1
    assert info.converged.tolist() == [False, True]
    assert weights[0, 3].eq(0).all()
    assert weights[1].isfinite().all()


def test_converged_is_neither_lax_nor_strict():
    scores = 2 * torch.randn(17, 13, dtype=torch.float64)
    reached = sinkhorn_limit(scores, max_iters=15, return_info=True)[1].residual.item()
    for factor, converged in ((0.99, False), (1.01, True)):
        _, info = sinkhorn_limit(scores, tol=factor * reached, max_iters=15, return_info=True)
        assert (bool(info.converged), info.iterations.item(), info.residual.item()) == (converged, 15, reached)


def test_each_matrix_is_judged_by_its_own_tau():
    """Where tau is 1 the marginals are known, and what the weights still change would stop ten times too early."""
    scores = 3 * torch.randn(3, 17, 17)
    mixed, info = sinkhorn_limit(scores, tau=torch.tensor([1.0, 0.5, 1.0]), tol=1e-4, return_info=True)
    full, alone = sinkhorn_limit(scores, tol=1e-4, return_info=True)
    relaxed, half = sinkhorn_limit(scores, tau=0.5, tol=1e-4, return_info=True)
    assert info.iterations.tolist() == [alone.iterations[0], half.iterations[1], alone.iterations[2]]
    assert_close(mixed, torch.stack([full[0], relaxed[1], full[2]]), atol=1e-6, rtol=0)
    _, cols = marginal_error(mixed)
    assert cols[0] <= 1e-4 + tolerance_floor(scores.dtype, 17, 17)
    assert cols[2] <= 1e-4 + tolerance_floor(scores.dtype, 17, 17)


TALL = [(7, 7), (300, 300), (2000, 3), (40, 1100), (100_003, 16), (300_007, 3), (3, 300_007)]


@pytest.mark.parametrize(("n", "m"), TALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [1.0, 2.0])
def test_the_smallest_tolerance_is_reached(n, m, std, dtype):
    weights, info = sinkhorn_limit(std * torch.randn(n, m, dtype=dtype), tol=1e-30, max_iters=401, return_info=True)
    assert info.converged
    # A sum rounds by √terms·eps, here with a margin of 2, and a block has 1024 terms at most. The residual is made of
    # such sums too, and the rows are set once more at the end: three of them.
    error = (weights.double().sum(0) * (m / n) - 1).abs().max().item()
    assert error <= 3 * 2 * torch.finfo(dtype).eps * min(max(n, m), 1024) ** 0.5


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_of_many_like_terms(transposed):
    """One after the other, k terms err by up to k·eps/2, and like terms do; blocks have 1024, and add up pairwise."""
    n = 100_003
    matrix, vector = torch.full((n, 3), 0.1), torch.full((n,), 0.3)
    matrix = matrix.mT.contiguous() if transposed else matrix.mT
    got, exact = kernel_domain.apply(matrix, vector).double(), matrix.double() @ vector.double()
    assert_close(got, exact, atol=0, rtol=512 * torch.finfo(torch.float32).eps)


def warning_of(*args, **options):
    with pytest.warns(ConvergenceWarning) as seen:
        sinkhorn_limit(*args, **options)
    assert len(seen) == 1
    return str(seen[0].message)


def test_the_warning_tells_the_tolerance_and_the_steps_that_were_used():
    scores = 4 * torch.randn(3, 17, 17)
    message = warning_of(scores, tol=1e-30, max_iters=6)
    assert "after 5 products" in message
    assert f"the tolerance {tolerance_floor(torch.float32, 17, 17):.2g}." in message


def test_the_warning_does_not_ask_for_more_steps_on_nan():
    scores = torch.randn(3, 5, 5)
    scores[1, 0, 0] = torch.nan
    message = warning_of(scores)
    assert message == "sinkhorn_limit: 1 of 3 matrices are NaN, because they hold NaN or plus infinity."
    scores[1, 0, 0], scores[2] = torch.inf, 9 * scores[2]
    message = warning_of(scores, max_iters=3)
    assert "2 of 3 matrices have not converged after 3 products; the largest residual is " in message
    assert message.endswith("1 of 3 matrices are NaN, because they hold NaN or plus infinity.")
    assert "nan" not in message


def test_the_warning_points_at_the_line_of_the_call():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        sinkhorn_limit(4 * torch.randn(5, 5), max_iters=3)
    assert [(warning.filename, warning.lineno) for warning in seen] == [(__file__, line)]
