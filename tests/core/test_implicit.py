"""The implicit gradient beside its definition: a dense system, solved by singular values in float64."""

import pytest
import torch

from sinkformers import sinkhorn
from sinkformers.core import implicit


def by_pseudo_inverse(weights, d_weights):
    """`G − W∘(x ⊕ y)` with (x, y) from the system of row and column sums; and its smallest non-zero eigenvalue."""
    local = weights * d_weights
    rows, cols = weights.sum(-1), weights.sum(-2)
    above = torch.cat([torch.diag_embed(rows), weights], -1)
    system = torch.cat([above, torch.cat([weights.mT, torch.diag_embed(cols)], -1)], -2)
    side = torch.cat([local.sum(-1), local.sum(-2)], -1)
    solution = (torch.linalg.pinv(system, hermitian=True, rtol=1e-10) @ side[..., None])[..., 0]
    x, y = solution.split(weights.shape[-2:], -1)
    scale = torch.cat([rows, cols], -1).clamp_min(1e-300).rsqrt()
    eigenvalues = torch.linalg.eigvalsh(system * scale[..., None] * scale[..., None, :])
    gap = eigenvalues.masked_fill(eigenvalues < 1e-10, torch.inf).amin(-1)
    return local - weights * (x[..., None] + y[..., None, :]), gap


@pytest.mark.parametrize(("n", "m"), [(6, 2), (3, 3), (5, 3), (17, 4)])
@pytest.mark.parametrize("n_iters", [3, 51])
@pytest.mark.parametrize("masked", [0.0, 0.15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_small_systems(n, m, n_iters, masked, dtype):
    """A few columns are solved for in as many steps; what is left is rounding, and must not be amplified without bound.

    The residual is a multiple of the solver's tolerance, and the error of a solution that over the smallest eigenvalue.
    """
    scores = 2 * torch.randn(1000, n, m, dtype=torch.float64)
    scores = scores.masked_fill(torch.rand(scores.shape) < masked, -torch.inf)
    weights, d_weights = sinkhorn(scores, n_iters=n_iters), torch.randn_like(scores)
    exact, gap = by_pseudo_inverse(weights, d_weights)
    got, _ = implicit.gradient(weights.to(dtype), d_weights.to(dtype), None, None, torch.zeros(1000, m, dtype=dtype))
    error = (got.double() - exact).abs().amax((-2, -1))
    allowed = 16 * implicit.TOLERANCE[dtype] * d_weights.abs().amax((-2, -1)) * n**0.5 / gap
    if dtype == torch.float64:
        allowed = allowed + 1e-9  # the pseudo-inverse drops eigenvalues below 1e-10 of the largest
    assert (error <= allowed).all(), (error / allowed).max()
