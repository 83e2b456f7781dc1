"""Attention by the kernels against the definition in float64: alternate normalisations of rows and columns."""

import math
import os
from pathlib import Path

import pytest
import torch

from kernels import get_local_kernel

FOLDER = Path(__file__).parents[1]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(scope="module")
def kernel():
    return get_local_kernel(FOLDER / "build" / "torch-cuda")


def reference(query, key, value, bias, n_iters):
    log = query @ key.mT / query.shape[-1] ** 0.5 + bias
    for step in range(n_iters):
        if step % 2 == 0:
            log = log - log.logsumexp(-1, keepdim=True)
        else:
            log = log - log.logsumexp(-2, keepdim=True) + math.log(query.shape[-2] / key.shape[-2])
    return log.exp() @ value


@pytest.mark.kernels_ci
@pytest.mark.parametrize("n_iters", [1, 3, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_output_and_gradients(kernel, n_iters, masked):
    torch.manual_seed(0)
    n, m, d, e = 19, 23, 5, 7
    exact = [torch.randn(2, 3, *size, dtype=torch.float64) for size in ((n, d), (m, d), (m, e))]
    exact.append(torch.randn(3, n, m, dtype=torch.float64))
    lengths = (m, 11 if masked else m)
    key_mask = torch.arange(m, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None, None] if masked else None
    exact = [x.requires_grad_() for x in exact]
    given = [x.detach().float().to(DEVICE).requires_grad_() for x in exact]
    q, k, v, bias = exact  # a masked key is one that is not there
    kept = [reference(q[b], k[b, :, :c], v[b, :, :c], bias[..., :c], n_iters) for b, c in enumerate(lengths)]
    expected = torch.stack(kept)
    out = kernel.sinkhorn_attention(*given[:3], n_iters=n_iters, bias=given[3], key_mask=key_mask)
    weight = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), exact)
    gradients = torch.autograd.grad((out * weight.float().to(DEVICE)).sum(), given)
    # Sums of at most n·m terms of size 1 in float32, a few times over.
    tolerance = 32 * max(n, m) * torch.finfo(torch.float32).eps
    for got, wanted in zip([out, *gradients], [expected, *expected_gradients], strict=True):
        assert (got.double().cpu() - wanted).abs().max() <= tolerance * max(1, wanted.abs().max())


def test_wrong_arguments(kernel):
    x = torch.randn(2, 5, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"n_iters must be at least 1; got 0\."):
        kernel.sinkhorn_attention(x, x, x, n_iters=0)
    with pytest.raises(ValueError, match=r"got \(2, 5, 4\), \(2, 5, 3\) and \(2, 5, 4\)"):
        kernel.sinkhorn_attention(x, x[..., :3], x)
    with pytest.raises(ValueError, match="float64"):
        kernel.sinkhorn_attention(x.double(), x.double(), x.double())


def test_operators_have_a_namespace_of_their_own(kernel):
    name = kernel.sinkhorn_attention.__module__.partition(".")[0]
    assert name.startswith("_sinkhorn_attention_cuda_")
    assert hasattr(getattr(torch.ops, name), "attend")
