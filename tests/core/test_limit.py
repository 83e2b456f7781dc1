"""The limit: Proposition 1, agreement with independent solvers, and scores of any size."""

import math

import ot
import pytest
import torch
from torch.testing import assert_close

from sinkformers import marginal_error, sinkhorn, sinkhorn_limit


def shift(n):
    return 5 * torch.randn(n, dtype=torch.float64)


def test_shifts_of_rows_and_columns_leave_the_limit_alone():
    scores = torch.randn(3, 11, 7, dtype=torch.float64)
    shifted = scores + shift((3, 11, 1)) + shift((3, 1, 7))
    kwargs = {"tol": 1e-13, "max_iters": 20001}
    assert_close(sinkhorn_limit(shifted, **kwargs), sinkhorn_limit(scores, **kwargs), atol=1e-11, rtol=0)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 6])
def test_row_shifts_leave_every_count_alone(n_iters):
    scores = torch.randn(3, 11, 7, dtype=torch.float64)
    shifted = scores + shift((3, 11, 1))
    assert_close(sinkhorn(shifted, n_iters=n_iters), sinkhorn(scores, n_iters=n_iters), atol=1e-13, rtol=0)


def test_permutation_equivariance():
    scores, rows, cols = torch.randn(11, 7, dtype=torch.float64), torch.randperm(11), torch.randperm(7)
    for normalise in (sinkhorn, lambda c: sinkhorn_limit(c, tol=1e-12)):
        assert_close(normalise(scores[rows][:, cols]), normalise(scores)[rows][:, cols], atol=1e-13, rtol=0)


def test_doubly_stochastic_input_is_a_fixed_point():
    stochastic = sinkhorn(torch.randn(9, 9, dtype=torch.float64), n_iters=501)
    for n_iters in (1, 2, 3, 8):
        assert_close(sinkhorn(stochastic.log(), n_iters=n_iters), stochastic, atol=1e-13, rtol=0)
    permutation = torch.eye(5)[torch.randperm(5)]
    assert sinkhorn(permutation.log(), n_iters=7).equal(permutation)
    assert sinkhorn_limit(permutation.log()).equal(permutation)


def test_one_query_is_mean_pooling():
    assert_close(sinkhorn(3 * torch.randn(1, 7), n_iters=3), torch.full((1, 7), 1 / 7))


@pytest.mark.parametrize("uniform", [True, False])
def test_agrees_with_pot(uniform):
    n, m = 11, 7
    row = torch.full((n,), 1 / n, dtype=torch.float64) if uniform else torch.rand(n).double().softmax(-1)
    col = torch.full((m,), 1 / m, dtype=torch.float64) if uniform else torch.rand(m).double().softmax(-1)
    scores = torch.randn(n, m, dtype=torch.float64)
    plan = torch.as_tensor(ot.sinkhorn(row.numpy(), col.numpy(), -scores.numpy(), reg=1.0, stopThr=1e-14))
    masses = {} if uniform else {"row_mass": row, "col_mass": col}
    assert_close(row[:, None] * sinkhorn_limit(scores, tol=1e-13, **masses), plan, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tau", [0.3, 0.9])
def test_agrees_with_pot_where_columns_are_relaxed(tau):
    """The penalty on the columns is λ = ετ/(1 − τ), with ε = 1 here, in relative entropy to the column masses."""
    n, m = 11, 7
    row, col = torch.rand(n).double().softmax(-1), torch.rand(m).double().softmax(-1)
    scores = torch.randn(n, m, dtype=torch.float64)
    plan = ot.unbalanced.sinkhorn_unbalanced(
        row.numpy(),
        col.numpy(),
        -scores.numpy(),
        reg=1.0,
        reg_m=(math.inf, tau / (1 - tau)),
        reg_type="kl",
        stopThr=1e-15,
        numItermax=100000,
    )
    got = sinkhorn_limit(scores, tau=tau, tol=1e-14, max_iters=20001, row_mass=row, col_mass=col)
    assert_close(row[:, None] * got, torch.as_tensor(plan), atol=1e-10, rtol=0)


def test_batch_mates_do_not_disturb():
    scores = torch.tensor([0.1, 4.0, 1.0, 2.0])[:, None, None] * torch.randn(4, 17, 13)
    together, info = sinkhorn_limit(scores, max_iters=3001, return_info=True)
    for index in range(4):
        alone, its = sinkhorn_limit(scores[index], max_iters=3001, return_info=True)
        assert_close(together[index], alone, atol=1e-6, rtol=0)
        assert abs(int(info.iterations[index] - its.iterations)) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [30.0, 1000.0])
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_sharp_scores_are_absorbed(std, dtype, tau):
    """Scalings drift far over many steps; rounding in the logarithm of scores of size s is s·eps, per step and side."""
    scores = std * torch.randn(2, 9, 9, dtype=torch.float64)
    weights, info = sinkhorn_limit(scores.to(dtype), tau=tau, max_iters=401, method="sinkhorn", return_info=True)
    assert_close(weights.sum(-1), torch.ones(2, 9, dtype=dtype), atol=1e-5, rtol=0)
    for index in range(2):
        exact = sinkhorn(
            scores.to(dtype).double()[index], n_iters=int(info.iterations[index]), tau=tau, backend="reference"
        )
        assert_close(weights[index].double(), exact, atol=400 * 4 * std * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("depth", [100.0, 1000.0])
def test_the_hub_is_absorbed(depth):
    """A row and half of the columns hold everything: u and v drift apart at every step, without an end.

    In float32 they leave the range within 60 steps where they are never absorbed.
    """
    n = 64
    scores = torch.full((n, n), -depth)
    scores[0], scores[:, : n // 2] = 0, 0
    weights, info = sinkhorn_limit(scores, max_iters=101, method="sinkhorn", return_info=True)
    exact = sinkhorn(scores.double(), n_iters=int(info.iterations), backend="reference")
    # A step rounds a sum and reads exponents of size `depth`.
    bound = (int(info.iterations) + 1) * torch.finfo(torch.float32).eps * (n**0.5 + depth)
    assert_close(weights.double(), exact, atol=bound * exact.max().item(), rtol=0)
    assert bool(info.converged) == (depth == 100)


def test_marginal_error_in_float64():
    rows, cols = marginal_error(torch.full((3, 7), 1 / 7, dtype=torch.float64))
    assert rows < 1e-15
    assert cols < 1e-15


def test_what_comes_in_where_an_entry_is_out_of_the_limit():
    scores = torch.randn(4, 4, dtype=torch.float64)
    scores[0, 1] = -torch.inf
    scores.requires_grad_()
    mass = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    for options, out in (({}, scores.detach() == -torch.inf), ({"col_mass": mass}, (mass == 0).expand(4, 4))):
        d_weights = torch.ones(4, 4, dtype=torch.float64).masked_fill(out, torch.nan)
        (grad,) = torch.autograd.grad(sinkhorn_limit(scores, max_iters=5001, **options), scores, d_weights)
        assert grad.isfinite().all()


def test_marginal_error_counts_what_takes_part():
    weights = torch.tensor([[0.5, 0.5, 9.0], [0.25, 0.25, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    rows, cols = marginal_error(weights, mask)
    assert (rows.item(), cols.item()) == (0.5, 0.25)
    rows, cols = marginal_error(torch.full((2, 5, 3), 1 / 3))
    assert_close(rows, torch.zeros(2), atol=1e-6, rtol=0)
    assert_close(cols, torch.zeros(2), atol=1e-6, rtol=0)
    assert [e.item() for e in marginal_error(weights, torch.zeros(3, 3, dtype=torch.bool))] == [0, 0]


@pytest.mark.parametrize("tau", [1.0, 0.6])
def test_the_implicit_gradient_in_float32(tau):
    scores, d_weights = torch.randn(3, 17, 13), torch.randn(3, 17, 13)
    grads = []
    for dtype in (torch.float32, torch.float64):
        x = scores.to(dtype).requires_grad_()
        weights = sinkhorn_limit(x, tau=tau, tol=1e-7, max_iters=5001)
        grads.append(torch.autograd.grad(weights, x, d_weights.to(dtype))[0].double())
    # The system's condition amplifies the residual of conjugate gradients, 1e-6, at most a few times at this spread.
    assert_close(grads[0], grads[1], atol=2e-5, rtol=0)
