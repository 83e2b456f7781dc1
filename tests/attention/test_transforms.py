"""The gradient operator inside autocast and under `torch.vmap`, where the forward one is tested by its own output."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention


@pytest.mark.parametrize("options", [{}, {"gradient": "implicit"}, {"cost": "l2"}], ids=str)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_backward_inside_autocast_is_backward_outside(backend, options):
    inputs = [torch.randn(2, n, 16, requires_grad=True) for n in (37, 41, 41)]
    with torch.autocast("cpu", torch.bfloat16):
        out = sinkhorn_attention(*inputs, n_iters=5, backend=backend, **options)
        d_out = torch.randn_like(out)
        inside = torch.autograd.grad(out, inputs, d_out, retain_graph=True)
    for a, b in zip(inside, torch.autograd.grad(out, inputs, d_out), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_every_entry_of_a_batch_draws_its_own_dropout_again_in_backward(backend):
    """Values that are the identity show the dropped weights W themselves; the gradient of the values is Wᵀ d_out."""
    q, k = torch.randn(3, 5, 4), torch.randn(3, 7, 4)
    v = torch.eye(7).expand(3, 7, 7)
    attend = torch.vmap(lambda *x: sinkhorn_attention(*x, dropout_p=0.5, backend=backend), randomness="different")
    dropped, vjp = torch.func.vjp(attend, q, k, v)
    assert not dropped[0].ne(0).equal(dropped[1].ne(0))
    d_out = torch.randn(3, 5, 7)
    # A sum of 5 products below 10 in float32.
    assert_close(vjp(d_out)[2], dropped.mT @ d_out, atol=5 * 10 * 1.2e-7, rtol=0)
