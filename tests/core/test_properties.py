"""Fuzzing: whatever finite scores and masks come in, finite weights with the right sums come out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkformers import sinkhorn, sinkhorn_attention
from tests import oracle

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
# One seed a case: hypothesis shrinks sizes and magnitudes, which is what failures hang on.
CASE = {
    "seed": st.integers(0, 2**31),
    "n": st.integers(1, 40),
    "m": st.integers(1, 40),
    "n_iters": st.integers(1, 60),
    "exponent": st.floats(-3, 4),
    "density": st.sampled_from([None, 0.2, 0.7]),
    "structure": st.sampled_from(["noise", "columns", "hub", "ties"]),
    "tau": st.sampled_from([1.0, 0.0, 0.3, 0.95]),
}


def scores_for(structure, n, m, exponent):
    scores = 10**exponent * torch.randn(n, m, dtype=torch.float64)
    if structure == "columns":
        scores = scores - 300 * torch.rand(m, dtype=torch.float64)
    if structure == "hub":
        scores = torch.full_like(scores, -(10**exponent))
        scores[0], scores[:, : m // 2 + 1] = 0, 0
    if structure == "ties":
        scores = (scores / 10**exponent).round() * 10**exponent
    return scores


@settings(max_examples=300, deadline=None)
@given(dtype=DTYPES, **CASE)
def test_finite_in_finite_out(seed, n, m, dtype, n_iters, exponent, density, structure, tau):
    torch.manual_seed(seed)
    scores = scores_for(structure, n, m, exponent).to(dtype).clamp(-6e4, 6e4).requires_grad_()
    mask = None if density is None else torch.rand(n, m) < density
    weights = sinkhorn(scores, n_iters=n_iters, mask=mask, tau=tau)
    (grad,) = torch.autograd.grad(weights, scores, torch.randn(n, m).to(dtype))
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert grad.isfinite().all()
    rows = torch.ones(n, dtype=torch.bool) if mask is None else mask.any(1)
    cols = torch.ones(m, dtype=torch.bool) if mask is None else mask.any(0)
    slack = (n_iters + max(n, m)) * torch.finfo(dtype).eps + 1e-7
    if n_iters % 2 or tau == 0:
        sums, expected = weights.double().sum(1), rows.double()
    elif tau == 1:
        sums, expected = weights.double().sum(0), cols * (rows.sum() / cols.sum().clamp_min(1)).double()
    else:
        return
    assert (sums - expected).abs().max() <= slack * max(1, n / m)


@settings(max_examples=150, deadline=None)
@given(**CASE)
def test_float64_is_the_definition(seed, n, m, n_iters, exponent, density, structure, tau):
    torch.manual_seed(seed)
    scores = scores_for(structure, n, m, exponent)
    mask = None if density is None else torch.rand(n, m) < density
    exact = oracle.batch_weights(scores, n_iters, tau, mask)
    got = sinkhorn(scores, n_iters=n_iters, tau=tau, mask=mask, backend="torch")
    # Exponents of size s carry s·eps, once per step and side.
    assert (got - exact).abs().max() <= 4 * (n_iters + 1) * (10 + scores.abs().max().item()) * 2.3e-16


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 20),
    m=st.integers(1, 20),
    pad=st.integers(0, 9),
    dtype=DTYPES,
    n_iters=st.integers(1, 22),
    cost=st.sampled_from(["dot", "l2"]),
    poison=st.sampled_from([0.0, torch.nan, torch.inf]),
)
def test_attention_forgets_its_padding(seed, n, m, pad, dtype, n_iters, cost, poison):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, size, 4, dtype=torch.float64).to(dtype) for size in (n, m, m))
    padded = [torch.cat([x, x.new_full((2, pad, 4), poison)], 1).requires_grad_() for x in (q, k, v)]
    real_q, real_k = torch.arange(n + pad) < n, torch.arange(m + pad) < m
    out = sinkhorn_attention(*padded, n_iters=n_iters, cost=cost, query_mask=real_q, key_mask=real_k)
    expected = sinkhorn_attention(q, k, v, n_iters=n_iters, cost=cost)
    # Each run rounds its result, and SoftMax attention in half precision its weights too: half an ulp of a value each.
    # Within the operator a step rounds sums of at most 29 terms.
    slack = 8 * (n_iters + 8) * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert (out[:, :n] - expected).abs().max() <= (8 * slack + 2 * oracle.eps(out)) * v.abs().max()
    assert out[:, n:].eq(0).all()
    grads = torch.autograd.grad(out, padded, torch.randn(out.shape).to(dtype))
    for grad, size in zip(grads, (n, m, m), strict=True):
        assert grad.isfinite().all()
        assert grad[:, size:].eq(0).all()
