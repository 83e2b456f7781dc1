"""The implicit gradient of attention with everything else that a call may have."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention


def tokens(n=7, m=11):
    return [torch.randn(2, 3, *shape, dtype=torch.float64) for shape in ((n, 4), (m, 4), (m, 5))]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    "options",
    [{"dropout_p": 0.4}, {"cost": "l2"}, {"key_mask": torch.arange(11) < 9, "query_mask": torch.arange(7) > 1}],
    ids=["dropout", "l2", "padding"],
)
def test_it_is_the_unrolled_one_where_converged(backend, options):
    """Relaxed columns converge by a factor of tau per pair of steps: 0.6 to the 150th is below 1e-33."""
    inputs = [*tokens(), torch.randn(3, 7, 11, dtype=torch.float64), torch.full((3,), 0.6, dtype=torch.float64)]
    d_out = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    found = []
    for gradient in ("implicit", "unrolled"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        *attended, tau = leaves
        torch.manual_seed(5)
        out = sinkhorn_attention(*attended, n_iters=301, tau=tau, gradient=gradient, backend=backend, **options)
        found.append([out, *torch.autograd.grad(out, leaves, d_out)])
    for implicit, unrolled in zip(*found, strict=True):
        assert_close(implicit, unrolled, atol=1e-10, rtol=0)
