"""Every backend is the definition, forward and gradient, on scores from nearly flat to absurdly sharp."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn
from tests import oracle
from tests.comparison import compare

BACKENDS = ["torch", "native", "reference"]


@pytest.mark.parametrize("shape", [(13, 7), (7, 13), (2, 3, 11, 11), (1, 1), (1, 5), (5, 1)])
def test_one_iteration_is_softmax(shape):
    scores = torch.randn(shape, requires_grad=True)
    expected = torch.softmax(scores, -1)
    for backend in ["auto", *BACKENDS]:
        got = sinkhorn(scores, n_iters=1, backend=backend)
        assert_close(got, expected, atol=4 * oracle.eps(scores), rtol=0)
        grad = torch.randn(shape)
        pair = [torch.autograd.grad(w, scores, grad, retain_graph=True)[0] for w in (got, expected)]
        assert_close(*pair, atol=16 * oracle.eps(scores), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", range(1, 22))
def test_every_count_is_the_definition(n_iters, dtype):
    for backend in BACKENDS:
        compare(torch.randn(2, 13, 13, dtype=dtype), n_iters, backend)
        compare(torch.randn(11, 17, dtype=dtype), n_iters, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [2, 3, 5, 21])
@pytest.mark.parametrize("std", [0.1, 1, 3, 10, 30, 100, 300, 1000])
def test_scores_of_any_sharpness(std, n_iters, dtype):
    scores = std * torch.randn(2, 37, 41, dtype=dtype)
    for backend in BACKENDS:
        compare(scores, n_iters, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [3, 4, 21])
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_columns_far_below_their_rows(tau, n_iters, dtype):
    scores = torch.randn(19, 23, dtype=dtype)
    scores[:, 5] -= 200
    scores[:, 7] -= 900
    for backend in ("torch", "native"):
        compare(scores, n_iters, backend, tau=tau)


def hub(n, dtype):
    """Half of the columns and one row at 0, the rest 1000 below: the column scalings run away from the row scalings."""
    scores = torch.full((n, n), -1000.0, dtype=dtype)
    scores[0] = 0
    scores[:, : n // 2] = 0
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [21, 31, 51, 101])
@pytest.mark.parametrize("n", [64, 512])
def test_the_hub(n, n_iters, dtype):
    for backend in ("torch", "native"):
        compare(hub(n, dtype), n_iters, backend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [21, 31, 51, 101])
def test_the_large_hub(n_iters, dtype):
    for backend in ("torch", "native"):
        compare(hub(2048, dtype), n_iters, backend)


def test_a_hub_disturbs_no_batch_mate():
    gentle = torch.randn(3, 64, 64)
    scores = torch.stack([gentle[0], hub(64, torch.float32), gentle[1], gentle[2]])
    together = sinkhorn(scores, n_iters=51)
    assert_close(together[[0, 2, 3]], sinkhorn(gentle, n_iters=51), atol=1e-6, rtol=0)
    for backend in ("torch", "native"):
        compare(scores, 51, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m", "n_iters"), [(9, 96, 51), (9, 96, 75), (16, 512, 51), (16, 512, 75), (96, 9, 51)])
def test_rectangles(n, m, n_iters, dtype):
    for backend in ("torch", "native"):
        compare(3 * torch.randn(n, m, dtype=dtype), n_iters, backend)


def test_a_very_tall_rectangle():
    for backend in ("torch", "native"):
        compare(torch.randn(20000, 8), 23, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", [0.0, 0.25, 0.9, 1.0])
@pytest.mark.parametrize("n_iters", [2, 3, 8, 21])
def test_relaxed_columns(n_iters, tau, backend):
    compare(2 * torch.randn(2, 11, 17), n_iters, backend, tau=torch.tensor(tau))
    compare(2 * torch.randn(2, 11, 17, dtype=torch.float64), n_iters, backend, tau=tau)


def test_tau_zero_is_softmax_and_tau_one_is_sinkhorn():
    scores = torch.randn(5, 11, 13)
    for n_iters in (2, 3, 7):
        assert_close(sinkhorn(scores, n_iters=n_iters, tau=0), scores.softmax(-1), atol=1e-6, rtol=0)
        relaxed = sinkhorn(scores, n_iters=n_iters, tau=torch.ones(5))
        assert_close(relaxed, sinkhorn(scores, n_iters=n_iters), atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 21])
def test_masses(n_iters, dtype, backend):
    row = torch.rand(3, 13, dtype=torch.float64).softmax(-1)
    col = torch.rand(17, dtype=torch.float64).softmax(-1)
    col = torch.where(torch.arange(17) % 5 == 0, 0, col)
    col /= col.sum()
    scores = torch.randn(3, 13, 17, dtype=dtype)
    compare(scores, n_iters, backend, row_mass=row, col_mass=col)
    compare(scores, n_iters, backend, row_mass=row, mask=torch.rand(3, 13, 17) > 0.4)
    compare(scores, n_iters, backend, col_mass=col, tau=0.5)


def test_masses_hold_at_convergence():
    row, col = torch.rand(13).softmax(-1), torch.rand(17).softmax(-1)
    weights = sinkhorn(torch.randn(13, 17), n_iters=51, row_mass=row, col_mass=col)
    assert_close(weights.sum(-1), torch.ones(13), atol=1e-6, rtol=0)
    assert_close(row @ weights, col, atol=1e-6, rtol=0)


def test_uniform_masses_change_nothing():
    scores = torch.randn(13, 17)
    uniform = sinkhorn(scores, n_iters=5, row_mass=torch.full((13,), 1 / 13), col_mass=torch.full((17,), 1 / 17))
    assert_close(uniform, sinkhorn(scores, n_iters=5), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 3e38])
def test_finite_scores_of_any_size_give_finite_weights(scale):
    scores = (scale * (2 * torch.rand(7, 11) - 1)).requires_grad_()
    for n_iters in (1, 2, 3, 21):
        for backend in ("auto", *BACKENDS):
            weights = sinkhorn(scores, n_iters=n_iters, backend=backend)
            assert weights.isfinite().all()
            (grad,) = torch.autograd.grad(weights, scores, torch.randn(7, 11))
            assert grad.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_nan_and_infinity_stay_in_their_matrix(backend, value):
    scores = torch.randn(3, 5, 7)
    clean = sinkhorn(scores, n_iters=3, backend=backend)
    scores[1, 2, 3] = value
    for n_iters in (1, 3):
        weights = sinkhorn(scores, n_iters=n_iters, backend=backend)
        assert weights[1, 2].isnan().all()
        assert weights[[0, 2]].isfinite().all()
        if n_iters == 1:
            assert_close(weights, scores.softmax(-1), equal_nan=True, atol=1e-6, rtol=0)
        else:
            assert_close(weights[[0, 2]], clean[[0, 2]], atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0)])
def test_empty(shape):
    for n_iters in (1, 3):
        scores = torch.randn(shape, requires_grad=True)
        weights = sinkhorn(scores, n_iters=n_iters)
        assert weights.shape == shape
        weights.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("std", [1.0, 20.0])
def test_half_precision_rounds_once(dtype, std):
    """Iterations run in float32, so that only the result is rounded: half an ulp of a weight, at most 1."""
    scores = (std * torch.randn(3, 31, 37)).to(dtype).requires_grad_()
    weights = sinkhorn(scores, n_iters=7)
    assert weights.dtype == dtype
    exact = oracle.batch_weights(scores.detach().double(), 7)
    assert_close(weights.double(), exact, atol=torch.finfo(dtype).smallest_normal + 1e-6, rtol=oracle.eps(weights))
    weights.sum().backward()
    assert scores.grad.dtype == dtype
