"""Whether a bias is known to hide nothing: its numbers decide, at every call."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from sinkformers.attention.mask_values import hides_nothing

N = 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_hides(dtype):
    bias, lowest = torch.randn(2, N, N).to(dtype), torch.finfo(dtype).min
    assert hides_nothing(bias)
    assert hides_nothing(bias[:1].expand(7, -1, -1))
    assert hides_nothing(bias.mT)
    assert not hides_nothing(bias, threshold=bias.min().item())
    for hidden in (-math.inf, lowest, lowest / 2, math.nan):
        changed = bias.clone()
        changed[1, 2, 3] = hidden
        assert not hides_nothing(changed)
    assert not hides_nothing(bias[:0])


def test_not_where_values_cannot_be_read():
    bias = torch.randn(3, N, N)
    seen = []
    torch.vmap(lambda x: seen.append(hides_nothing(x)) or x)(bias)
    torch.func.grad(lambda x: seen.append(hides_nothing(x)) or x.sum())(bias)
    seen.append(hides_nothing(bias.to("meta")))
    assert seen == [False] * 3


@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("change", ["numpy", "data"])
def test_a_change_that_no_version_shows(n_iters, change):
    """Memory shared with NumPy, and `.data`, are written without torch's counting it."""
    array = np.zeros((N, N), dtype=np.float32)
    bias = torch.from_numpy(array) if change == "numpy" else torch.zeros(N, N)
    q, k, v = torch.randn(3, 2, N, 4).unbind()
    options = {"n_iters": n_iters, "allow_one_way_mask": True, "backend": "torch" if n_iters > 1 else "auto"}
    assert_close(sinkhorn_attention(q, k, v, bias, **options), sinkhorn_attention(q, k, v, **options))
    if change == "numpy":
        array[:, 1] = -np.inf
    else:
        bias.data[:, 1] = -math.inf
    v[:, 1] = math.nan  # the contents of a key that no query sees
    out = sinkhorn_attention(q, k, v, bias, **options)
    assert out.isfinite().all()
    assert_close(out, sinkhorn_attention(q, k, v, bias.clone(), **options))
