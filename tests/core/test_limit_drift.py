"""The limit of sharp scores, whose scalings drift far and are taken into the kernel again and again."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_limit
from tests import oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_iters", [1, 3, 5, 11, 51, 201])
@pytest.mark.parametrize("tau", [1.0, 0.9])
def test_rows_sum_to_one_wherever_it_stops(dtype, max_iters, tau):
    """A kernel computed again around potentials of size s carries their rounding, s·eps; the last row step must not."""
    scores = 3000 * torch.randn(8, 24, 24, dtype=dtype)
    weights, _ = sinkhorn_limit(scores, max_iters=max_iters, tau=tau, return_info=True)
    # The rounding of a sum of 24 terms, √24·eps, of the quotients, and a margin.
    assert (weights.double().sum(-1) - 1).abs().max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("max_iters", [5, 11, 21])
@pytest.mark.parametrize("given", [("row_mass",), ("col_mass",), ("row_mass", "col_mass")], ids="-".join)
def test_masses_of_sharp_scores(max_iters, given):
    """Stopped early, the limit is so many normalisations; those with masses drift too."""
    sides = {"row_mass": torch.rand(11).double().mul(3).softmax(-1), "col_mass": torch.rand(13).double().softmax(-1)}
    masses = {name: sides[name] for name in given}
    scores = 100 * torch.randn(4, 11, 13, dtype=torch.float64)
    weights, info = sinkhorn_limit(scores, max_iters=max_iters, tol=1e-14, return_info=True, **masses)
    assert (info.iterations == max_iters).any()
    for got, each, taken in zip(weights, scores, info.iterations, strict=True):
        # Potentials of a few hundred carry so many times eps, once a step.
        exact = oracle.weights(each, int(taken), **masses)
        assert_close(got, exact, atol=max_iters * 1000 * 2.3e-16, rtol=0)
