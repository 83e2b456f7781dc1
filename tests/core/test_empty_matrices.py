"""Matrices of which nothing is left, columns that hold NaN, and what masks cost: nothing shows beyond them."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_limit
from sinkformers.core import log_domain
from tests import oracle

BACKENDS = ["torch", "native", "reference", "limit"]


def weights_of(backend, scores, n_iters, **options):
    if backend == "limit":
        return sinkhorn_limit(scores, max_iters=n_iters, return_info=True, **options)[0]
    return sinkhorn(scores, n_iters=n_iters, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [("row_mass",), ("col_mass",), ("row_mass", "col_mass")], ids="-".join)
@pytest.mark.parametrize("n_iters", [1, 2, 3, 21])
def test_a_matrix_without_entries_gives_zeros_under_masses_too(backend, given, n_iters):
    """Its masses have nothing to be divided by; the matrix beside it is that of a call of its own."""
    scores = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    mask[0] = False
    sides = {"row_mass": torch.rand(5).double().softmax(-1), "col_mass": torch.rand(7).double().softmax(-1)}
    masses = {name: sides[name] for name in given}
    n_iters = n_iters if n_iters % 2 or backend != "limit" else n_iters + 1
    weights = weights_of(backend, scores, n_iters, mask=mask, **masses)
    (grad,) = torch.autograd.grad(weights, scores, torch.randn(2, 5, 7, dtype=torch.float64))
    for result in (weights, grad):
        assert result[0].eq(0).all()
        assert result[1].isfinite().all()
    if backend != "limit":
        exact = oracle.weights(scores[1].detach(), n_iters, **masses)
        assert_close(weights[1], exact, atol=1e-13, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS[:3])
@pytest.mark.parametrize(("n", "m"), [(5, 7), (37, 41)])
@pytest.mark.parametrize("masses", [False, True])
def test_a_column_with_nan_is_nan_once_columns_are_normalised(backend, n, m, masses):
    """It must not be taken for a column of which nothing is left: its other entries would look like weights."""
    scores = torch.randn(2, n, m)
    scores[0, 1, 2] = torch.nan
    options = {"row_mass": torch.full((n,), 1 / n), "col_mass": torch.full((m,), 1 / m)} if masses else {}
    weights = sinkhorn(scores, n_iters=2, backend=backend, **options)
    assert weights[0, :, 2].isnan().all()
    assert weights[0, 1].isnan().all()
    assert weights[1].isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("masses", [False, True])
def test_masked_lines_send_no_gentle_matrix_to_the_log_domain(backend, masses, monkeypatch):
    """The log domain would be right as well, and many times as slow."""
    calls, original = [], log_domain.potentials
    monkeypatch.setattr(log_domain, "potentials", lambda *a: calls.append(1) or original(*a))
    scores, tau = torch.randn(3, 29, 31, requires_grad=True), torch.tensor([0.3, 0.8, 1.0], requires_grad=True)
    mask = (torch.arange(29) < torch.tensor([29, 20, 0])[:, None])[..., None] & (torch.arange(31) != 3)
    options = {"row_mass": torch.full((29,), 1 / 29)} if masses else {}
    for n_iters in (1, 2, 5):
        weights = sinkhorn(scores, n_iters=n_iters, tau=tau, mask=mask, backend=backend, **options)
        torch.autograd.grad(weights, (scores, tau), torch.randn(3, 29, 31))
    assert not calls
