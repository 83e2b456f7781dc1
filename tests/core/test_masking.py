"""Masking equals deletion, and what stands in the padding changes nothing."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_limit
from tests import oracle
from tests.comparison import compare

BACKENDS = ["auto", "torch", "native", "reference"]
N_ITERS = [1, 2, 3, 4, 21]


def subset(n):
    keep = torch.rand(n) > 0.4
    keep[torch.randint(n, ())] = True
    keep[torch.randint(n, ())] = False
    keep[0] = True
    return keep


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_iters", N_ITERS)
def test_masking_equals_deletion(n_iters, backend):
    scores = torch.randn(13, 17, requires_grad=True)
    rows, cols = subset(13), subset(17)
    masked = sinkhorn(scores, n_iters=n_iters, mask=rows[:, None] & cols, backend=backend)
    deleted = sinkhorn(scores[rows][:, cols], n_iters=n_iters, backend=backend)
    tolerance, grad_tolerance = oracle.tolerances(scores[rows][:, cols], n_iters, torch.ones(1))
    assert_close(masked[rows][:, cols], deleted, atol=tolerance, rtol=0)
    assert masked[~rows].eq(0).all()
    assert masked[:, ~cols].eq(0).all()
    d_weights = torch.rand(13, 17)
    (grad,) = torch.autograd.grad(masked, scores, d_weights)
    (expected,) = torch.autograd.grad(deleted, scores, d_weights[rows][:, cols])
    assert_close(grad, expected, atol=grad_tolerance, rtol=0)
    assert grad[~rows].eq(0).all()
    assert grad[:, ~cols].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_iters", N_ITERS)
def test_what_stands_in_the_padding_changes_no_bit(n_iters, backend):
    mask = subset(13)[:, None] & subset(17) & (torch.rand(13, 17) > 0.2)
    results = []
    for filling in (0.0, 1e30, float("nan"), float("inf"), float("-inf")):
        torch.manual_seed(1)
        scores = torch.randn(13, 17).masked_fill(~mask, filling).requires_grad_()
        d_weights = torch.randn(13, 17).masked_fill(~mask, filling)
        weights = sinkhorn(scores, n_iters=n_iters, mask=mask, backend=backend)
        results.append((weights, *torch.autograd.grad(weights, scores, d_weights)))
    for weights, grad in results:
        assert weights.equal(results[0][0])
        assert grad.equal(results[0][1])
        assert grad.isfinite().all()
        assert grad[~mask].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_iters", N_ITERS)
def test_nothing_left_gives_zeros(n_iters, backend):
    scores = torch.randn(2, 5, 7)
    scores[0, 2] = -torch.inf
    scores[0, :, 3] = -torch.inf
    scores[1] = -torch.inf
    scores.requires_grad_()
    weights = sinkhorn(scores, n_iters=n_iters, backend=backend)
    assert weights[0, 2].eq(0).all()
    assert weights[0, :, 3].eq(0).all()
    assert weights[1].eq(0).all()
    assert_close(weights.double(), oracle.batch_weights(scores.detach(), n_iters), atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(weights, scores, torch.full_like(weights, torch.nan).masked_fill(weights != 0, 1.0))
    assert grad[1].eq(0).all()
    assert grad[0, 2].eq(0).all()


@pytest.mark.parametrize("backend", [*BACKENDS, "limit"])
@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize(("n", "m"), [(5, 7), (37, 41)])
@pytest.mark.parametrize("by", ["mask", "minus infinity", "mass"])
def test_nan_that_takes_part_reaches_nothing_masked(backend, n_iters, n, m, by):
    """In the scores it spoils the rest of its matrix, and so does NaN that comes in with the gradient."""
    rows, cols = subset(n), subset(m)
    mask, masses = rows[:, None] & cols, {"row_mass": rows / rows.sum(), "col_mass": cols / cols.sum()}
    mask[0, 0] = True
    if by != "mass":
        mask, masses = mask & (torch.rand(n, m) > 0.2), {}
    options = {"mask": mask} if by == "mask" else masses
    for poisoned in ("scores", "gradient"):
        scores = torch.randn(2, n, m).masked_fill(~mask, -torch.inf if by == "minus infinity" else 1.0)
        d_weights = torch.randn(2, n, m)
        mask[0, 0] = True
        (scores if poisoned == "scores" else d_weights)[0, 0, 0] = torch.nan
        scores.requires_grad_()
        if backend == "limit":
            weights, _ = sinkhorn_limit(scores, max_iters=n_iters, return_info=True, **options)
        else:
            weights = sinkhorn(scores, n_iters=n_iters, backend=backend, **options)
        (grad,) = torch.autograd.grad(weights, scores, d_weights)
        for result in (weights, grad):
            assert result[:, ~mask].eq(0).all()
            assert result[1].isfinite().all()
        assert (weights if poisoned == "scores" else grad)[0, 0, 0].isnan()


def structured_masks(n):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return {
        "window": (i - j).abs() <= 2,
        "blocks": (i // 4) == (j // 4),
        "uneven blocks": ((i < 3) & (j < 8)) | ((i >= 3) & (j >= 8)),
        "triangle": i >= j,
        "one empty row": (i != 4) & (j != 6) & ((i + j) % 3 > 0),
    }


@pytest.mark.parametrize("name", structured_masks(13))
@pytest.mark.parametrize("n_iters", [1, 2, 3, 5, 21, 101])
@pytest.mark.parametrize("backend", ["torch", "native", "reference"])
def test_masks_that_are_no_product(name, n_iters, backend):
    mask = structured_masks(13)[name]
    compare(torch.randn(2, 13, 13), n_iters, backend, mask=mask)
    compare(torch.randn(13, 13, dtype=torch.float64), n_iters, backend, mask=mask, tau=0.5)


@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 1), (3, 1, 1), (3, 1, 7), (3, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)])
def test_masks_broadcast(shape):
    scores, mask = torch.randn(2, 3, 5, 7), torch.rand(shape) > 0.3
    expanded = mask.expand(2, 3, 5, 7)
    assert sinkhorn(scores, mask=mask).equal(sinkhorn(scores, mask=expanded.contiguous()))


def test_a_zero_mass_takes_its_line_out():
    scores, row, col = torch.randn(5, 7), torch.rand(5), torch.rand(7)
    row[2], col[4] = 0, 0
    row, col = row / row.sum(), col / col.sum()
    poisoned = scores.clone()
    poisoned[2], poisoned[:, 4] = torch.nan, torch.inf
    weights = sinkhorn(poisoned, n_iters=3, row_mass=row, col_mass=col)
    keep_rows, keep_cols = row > 0, col > 0
    deleted = sinkhorn(scores[keep_rows][:, keep_cols], n_iters=3, row_mass=row[keep_rows], col_mass=col[keep_cols])
    assert_close(weights[keep_rows][:, keep_cols], deleted, atol=1e-6, rtol=0)
    assert weights[2].eq(0).all()
    assert weights[:, 4].eq(0).all()


def test_the_limit_masks_by_deletion_too():
    scores = torch.randn(13, 17, dtype=torch.float64)
    rows, cols = subset(13), subset(17)
    poisoned = scores.masked_fill(~(rows[:, None] & cols), torch.nan).requires_grad_()
    masked = sinkhorn_limit(poisoned, mask=rows[:, None] & cols, tol=1e-12)
    deleted = sinkhorn_limit(scores[rows][:, cols], tol=1e-12)
    assert_close(masked[rows][:, cols], deleted, atol=1e-11, rtol=0)
    assert masked[~rows].eq(0).all()
    (grad,) = torch.autograd.grad(masked, poisoned, torch.where(rows[:, None] & cols, torch.rand(13, 17), torch.nan))
    assert grad.isfinite().all()
    assert grad[~rows].eq(0).all()
    assert grad[:, ~cols].eq(0).all()
