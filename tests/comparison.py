"""The library beside the oracle."""

import torch
from torch.testing import assert_close

from sinkformers import sinkhorn
from tests import oracle


def compare(scores, n_iters, backend, **options):
    """Weights and gradient against float64, within the derived tolerance."""
    scores = scores.detach().requires_grad_()
    d_weights = torch.randn(scores.shape, dtype=torch.float64)
    exact_scores = scores.detach().double().requires_grad_()
    exact = oracle.batch_weights(exact_scores, n_iters, **options)
    (exact_grad,) = torch.autograd.grad(exact, exact_scores, d_weights)
    got = sinkhorn(scores, n_iters=n_iters, backend=backend, **options)
    (grad,) = torch.autograd.grad(got, scores, d_weights.to(scores.dtype))
    if scores.dtype == torch.float64:
        tolerance = grad_tolerance = 1e-10
    else:
        tolerance, grad_tolerance = oracle.tolerances(scores, n_iters, d_weights, **options)
    assert_close(got.double(), exact, atol=tolerance, rtol=0)
    assert_close(grad.double(), exact_grad, atol=grad_tolerance, rtol=0)
