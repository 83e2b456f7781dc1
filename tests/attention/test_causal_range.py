"""Sharp scores, long contexts and half precision: finite, and right to rounding."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers import causal_sinkhorn
from tests import causal_oracle as oracle
from tests.causal_cases import BACKENDS, MASKS, N, attend, causal_gradients, tokens

FAST = [name for name in BACKENDS if name != "reference"]


@pytest.mark.parametrize("std", [30.0, 300.0, 1e4])
@pytest.mark.parametrize("name", ["triangle", "window", "cross-attention"])
@pytest.mark.parametrize("definition", oracle.DEFINITIONS)
def test_sharp_scores(definition, name, std):
    mask = MASKS[name]
    if definition == "prefix" and name == "cross-attention":
        return
    scores = std * torch.randn(2, *mask.shape)
    weights = causal_sinkhorn(scores, n_iters=5, mask=mask, definition=definition)
    exact = oracle.weights(scores, 5, mask=mask, definition=definition)
    every = torch.ones_like(mask) if definition == "prefix" else mask  # where scores are read
    assert_close(weights.double(), exact, atol=oracle.tolerance(scores, every, 5), rtol=0)


@pytest.mark.parametrize("std", [30.0, 300.0, 1e4])
@pytest.mark.parametrize("name", ["triangle", "window", "cross-attention"])
@pytest.mark.parametrize("backend", FAST)
def test_sharp_attention(backend, name, std):
    """The scores themselves are rounded: the bias holds them, and the tokens are zeros."""
    mask, results = MASKS[name], []
    bias = std * torch.randn(3, *mask.shape)
    query, key, value = (x.detach() for x in tokens(mask, 3, dtype=torch.float32))
    for served, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        inputs = [x.to(dtype).requires_grad_() for x in (0 * query, 0 * key, value, bias)]
        out = attend(*inputs[:3], inputs[3].masked_fill(~mask, -math.inf), n_iters=5, backend=served)
        results.append([out, *causal_gradients(out, inputs)])
    exact = oracle.weights(bias, 5, mask=mask) @ value.double()
    bound = oracle.tolerance(bias, mask, 5) * max(1.0, value.abs().max().item())
    assert_close(results[0][0].double(), exact, atol=bound, rtol=0)
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        size = max(1.0, want.abs().max().item())
        assert_close(got.double(), want, atol=6 * sum(mask.shape) * bound * size, rtol=0)


@pytest.mark.parametrize("definition", oracle.DEFINITIONS)
def test_a_huge_score_that_no_query_sees_matters_to_none(definition):
    """Above the diagonal for the streaming definition; between later tokens for prefixes."""
    scores = torch.randn(N, N)
    exact = oracle.weights(scores, 5, definition=definition)
    scores[4, 11] = 1e5
    weights = causal_sinkhorn(scores, n_iters=5, definition=definition)
    rows = slice(None) if definition == "streaming" else slice(0, 11)
    bound = oracle.tolerance(torch.randn(N, N).clamp(-4, 4), MASKS["triangle"], 5)
    assert_close(weights.double()[rows], exact[rows], atol=bound, rtol=0)


@pytest.mark.parametrize("n_iters", [1, 3])
def test_a_later_key_that_a_query_likes_far_better(n_iters):
    """The kernel is shared by all prefixes, and small in rows such as these: denormal numbers are wrong by percents."""
    scores = torch.randn(N, N)
    scores[:, -1] += torch.linspace(60, 104, N)
    weights = causal_sinkhorn(scores, n_iters=n_iters, definition="prefix")
    exact = oracle.weights(scores, n_iters, definition="prefix")
    assert_close(
        weights.double(), exact, atol=oracle.tolerance(scores, torch.ones_like(MASKS["triangle"]), n_iters), rtol=0
    )


def test_gradients_of_relaxed_prefixes_are_finite():
    """A power of a large scaling is in range where the scaling's own gradient is not."""
    scores = torch.zeros(4, 4, requires_grad=True)
    hidden = torch.zeros(4, 4)
    hidden[:, 1] = -65.0
    weights = causal_sinkhorn(scores + hidden, tau=0.5, definition="prefix")
    assert_close(weights.detach().double(), oracle.weights(hidden, 3, 0.5, definition="prefix"), atol=1e-5, rtol=0)
    (grad,) = torch.autograd.grad(weights[-1, 1], scores)
    exact = hidden.double().requires_grad_()
    (want,) = torch.autograd.grad(causal_sinkhorn(exact, tau=0.5, definition="prefix")[-1, 1], exact)
    assert_close(grad.double(), want, atol=1e-5, rtol=0)


def test_compiled_prefixes_are_right_or_not_a_number():
    """Values cannot be read in a graph, so that the kernel domain cannot be left: NaN, and nothing finite and wrong."""
    torch._dynamo.reset()
    scores = torch.randn(2, N, N)
    scores[1, 4, 11] = 1e5
    function = lambda scores: causal_sinkhorn(scores, n_iters=5, definition="prefix")  # noqa: E731
    exact = oracle.weights(scores, 5, definition="prefix")
    for found in (torch.compile(function, backend="eager", fullgraph=True)(scores), torch.vmap(function)(scores)):
        assert_close(found[0].double(), exact[0], atol=1e-5, rtol=0)
        wrong = (found[1].double() - exact[1]).abs() > 1e-5
        assert not wrong.any()
        assert found[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", FAST)
def test_half_precision_iterates_in_float32(backend, dtype):
    """The output is that of float32 on the same numbers, rounded once; gradients likewise."""
    given = tokens(MASKS["triangle"], 2, dtype=dtype)
    wide = [x.detach().float().requires_grad_() for x in given]
    results = []
    for inputs in (given, wide):
        out = attend(*inputs, is_causal=True, n_iters=5, backend=backend)
        results.append([out, *causal_gradients(out, inputs)])
    eps = torch.finfo(dtype).eps
    for got, exact in zip(*results, strict=True):
        assert got.dtype == dtype
        # The incoming gradients differ by their rounding too; a row adds N of them.
        bound = (1 if got is results[0][0] else N) * eps * max(1.0, exact.abs().max().item())
        assert_close(got.float(), exact, atol=bound, rtol=0)


@pytest.mark.parametrize("backend", FAST)
def test_uniform_scores_stay_uniform_in_long_contexts(backend):
    """Of 2,000 positions in float32: sums over queries err by their number times eps at most."""
    value = torch.randn(1, 2000, 2)
    zeros = torch.zeros(1, 2000, 1)
    out = attend(zeros, zeros, value, is_causal=True, backend=backend)
    mean = value.double().cumsum(1) / torch.arange(1, 2001)[:, None]
    assert_close(out.double(), mean, atol=2000 * 1.2e-7 * value.abs().max().item(), rtol=0)


def three_steps(query, key, value, rows):
    """Outputs of some rows with n_iters=3, in float64, by blocks: SoftMax over what each key has received of it."""
    query, key, value = (x.detach()[0].double() for x in (query, key, value))
    n, out, depth = len(query), {}, 0.0
    received, harmonic = torch.zeros(n, dtype=torch.float64), torch.arange(1, n + 1).double().reciprocal().cumsum(0)
    before = torch.cat([torch.zeros(1, dtype=torch.float64), harmonic])
    for start in range(0, n, 256):
        stop = min(start + 256, n)
        scores = query[start:stop] @ key[:stop].mT * key.shape[-1] ** -0.5
        depth = max(depth, (scores.amax(-1) - scores.amin(-1)).max().item())
        scores[:, start:] = scores[:, start:].masked_fill(
            torch.ones(stop - start, stop - start).triu(1) == 1, -math.inf
        )
        softmax = scores.softmax(-1)
        for i in (i for i in rows if start <= i < stop):
            expected = harmonic[i] - before[: i + 1]
            sums = received[: i + 1] + softmax[: i + 1 - start, : i + 1].sum(0)
            weights = softmax[i - start, : i + 1] * expected / sums
            out[i] = weights @ value[: i + 1] / weights.sum()
        received[:stop] += softmax.sum(0)
    return torch.stack([out[i] for i in rows]), depth


def test_three_steps_are_the_oracles():
    given = tokens(MASKS["triangle"], 1)
    rows = list(range(N))
    exact = oracle.attention(*given, 3)[0]
    assert_close(three_steps(*given, rows)[0], exact, atol=1e-12, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", FAST)
def test_32768_positions(backend, dtype):
    """Sampled rows are right, and all gradients finite, with scores that prefer the first key."""
    n = 32_768
    query, key, value = torch.randn(1, n, 8), torch.randn(1, n, 8), torch.randn(1, n, 3)
    key[:, 0] += 20
    value[..., 0] = 1.0
    inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    out = attend(*inputs, is_causal=True, backend=backend)
    assert_close(out[..., 0], torch.ones(1, n, dtype=dtype), atol=n * torch.finfo(dtype).eps, rtol=0)
    rows = [0, 1, 255, 256, 5_000, 20_001, n - 2, n - 1]
    exact, depth = three_steps(*inputs, rows)
    bound = 4 * torch.finfo(dtype).eps * (2 * n + depth) * value.abs().max().item()  # as in `oracle.tolerance`
    assert_close(out[0, rows].double(), exact, atol=bound, rtol=0)
    for grad in torch.autograd.grad(out, inputs, torch.randn_like(out)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", FAST)
def test_gradients_of_rows_whose_attention_later_rows_outweigh(backend):
    """Three rows give key 0 about e¹² times what the row before gave: small gradients are right to rounding."""
    mask = torch.ones(N, N, dtype=torch.bool)
    _, _, value = tokens(mask, 3, dtype=torch.float32)
    bias, none, results = torch.randn(3, N, N), torch.zeros(3, N, 1), []
    bias[..., :3, 0] = torch.tensor([-24.0, -12.0, 0.0])
    for served, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        added = bias.to(dtype).requires_grad_()
        given = (none.to(dtype), none.to(dtype), value.detach().to(dtype))
        out = attend(*given, attn_mask=added, n_iters=5, tau=0.25, backend=served)
        results += causal_gradients(out, [added])
    # A few roundings of scores that are 24 deep, at worst where two terms of a gradient cancel to a tenth.
    assert_close(results[0].double(), results[1], rtol=512 * torch.finfo(torch.float32).eps, atol=0)
