"""Heads that the log domain takes: their dropout is that of the whole call, and NaN outside the mask stays there."""

import pytest
import torch
from torch.testing import assert_close

import oracle
from sinkformers import sinkhorn, sinkhorn_attention
from sinkformers.core import log_domain

BACKENDS = ["torch", "native"]
N, M, HEADS = 23, 29, 3
SHARP = 1  # the head that the log domain takes
STEPS = 51


@pytest.fixture
def taken(monkeypatch):
    """How many matrices each run of the log domain had."""
    calls, original = [], log_domain.potentials
    monkeypatch.setattr(log_domain, "potentials", lambda p, *a: calls.append(len(p.scores)) or original(p, *a))
    return calls


def hub(n=N, m=M):
    """All but the first query look at half of the keys, and one key lies deeper than any scaling can make up for."""
    scores = torch.full((n, m), -1000.0)
    scores[0], scores[:, : m // 2] = 0, 0
    scores[:, m // 2 + 1] = -1000.0
    return scores + 0.3 * torch.randn(n, m)


def sharp_bias():
    return torch.stack([hub() if head == SHARP else torch.randn(N, M) for head in range(HEADS)])


def tokens(e=5):
    return [0.5 * torch.randn(2, HEADS, n, width) for n, width in ((N, 4), (M, 4), (M, e))]


def attend(inputs, d_out, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.manual_seed(11)
    out = sinkhorn_attention(*leaves, n_iters=STEPS, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_dropout_is_that_of_the_whole_call(backend, dropout_p, taken):
    """The definition has no domains to choose from; values that are the identity show every weight that was dropped."""
    q, k, _ = tokens()
    value, bias = torch.eye(M).expand(2, HEADS, M, M), sharp_bias()
    inputs = (q, k, value, bias)
    d_out = torch.randn(2, HEADS, N, M)
    got = attend(inputs, d_out, dropout_p=dropout_p, backend=backend)
    assert set(taken) == {2}  # one head of each of the two in the batch
    expected = attend([x.double() for x in inputs], d_out.double(), dropout_p=dropout_p, backend="reference")
    kept = expected[0] != 0
    assert got[0].ne(0).equal(kept & (got[0] != 0))
    # The first query of the sharp head looks everywhere, so that its own zeros are those of dropout.
    assert got[0][:, :, 0].ne(0).equal(kept[:, :, 0])
    scores = (q @ k.mT / 2 + bias).detach()
    tolerance, grad_tolerance = oracle.tolerances(scores, STEPS, d_out / max(1 - dropout_p, 0.5))
    per_kept = 1 / max(1 - dropout_p, 0.5)
    assert_close(got[0].double(), expected[0], atol=per_kept * tolerance, rtol=0)
    for place, (a, b) in enumerate(zip(got[1:], expected[1:], strict=True)):
        # The values' gradient sums N weights each; that of the bias sums over the batch.
        atol = per_kept * tolerance * d_out.abs().sum(-2).max().item() if place == 2 else 2 * grad_tolerance
        assert_close(a.double(), b, atol=atol, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_of_the_other_heads_is_not_disturbed(backend):
    """Without the sharp head in it the same call drops the same weights of the same places."""
    q, k, v = tokens()
    bias = sharp_bias()
    gentle = bias.clone()
    gentle[SHARP] = torch.randn(N, M)
    d_out = torch.randn(2, HEADS, N, 5)
    sharp, plain = (attend((q, k, v, b), d_out, dropout_p=0.3, backend=backend) for b in (bias, gentle))
    others = [head for head in range(HEADS) if head != SHARP]
    for a, b in zip(sharp[:4], plain[:4], strict=True):
        assert a[:, others].equal(b[:, others])
        assert not a[:, SHARP].equal(b[:, SHARP])
    assert sharp[4][others].equal(plain[4][others])


def padding(way):
    """Two padded queries and three padded keys, said in different ways; and the bias that makes a head sharp."""
    rows, cols = torch.arange(N) < N - 2, torch.arange(M) < M - 3
    inside = rows[:, None] & cols
    bias = sharp_bias()
    masks = {"query_mask": rows, "key_mask": cols} if way == "token masks" else {}
    if way == "bias":
        bias = bias.masked_fill(~inside, -torch.inf)
    return rows, cols, inside, bias, masks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["token masks", "bias"])
@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
@pytest.mark.parametrize("where", ["query", "key", "value", "d_out"])
def test_nan_in_the_padding_changes_no_bit(where, gradient, way, backend, taken):
    rows, cols, _, bias, masks = padding(way)
    inputs, d_out = tokens(), torch.randn(2, HEADS, N, 5)
    named = dict(zip(("query", "key", "value", "d_out"), [*inputs, d_out], strict=True))
    results = []
    for filling in (0.0, torch.nan, torch.inf):
        named[where] = named[where].clone()
        named[where][:, :, ~(rows if where in ("query", "d_out") else cols)] = filling
        *filled, gradient_in = named.values()
        leaves = [x.clone().requires_grad_() for x in filled]
        out = sinkhorn_attention(*leaves, bias, n_iters=STEPS, gradient=gradient, backend=backend, **masks)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, gradient_in)))
    assert set(taken) == {2}
    for result in results:
        for a, b, alive in zip(result, results[0], (rows, rows, cols, cols), strict=True):
            assert a.equal(b)
            assert a.isfinite().all()
            assert a[:, :, ~alive].eq(0).all()
            assert a[:, :, alive].ne(0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
@pytest.mark.parametrize("where", ["query", "key", "value", "d_out"])
def test_nan_of_a_valid_token_reaches_no_padding(where, gradient, backend):
    """It comes out again in its own head, and neither at padded tokens nor in other heads."""
    rows, cols, inside, bias, masks = padding("token masks")
    inputs, d_out = tokens(), torch.randn(2, HEADS, N, 5)
    for head in (SHARP, 0):
        poisoned = [x.clone() for x in (*inputs, d_out)]
        poisoned[("query", "key", "value", "d_out").index(where)][1, head, 2, 1] = torch.nan
        leaves = [x.requires_grad_() for x in (*poisoned[:3], bias.clone())]
        out = sinkhorn_attention(*leaves, n_iters=STEPS, gradient=gradient, backend=backend, **masks)
        grads = torch.autograd.grad(out, leaves, poisoned[3])
        assert any(x[1, head].isnan().any() for x in (out, *grads[:3]))
        others = [other for other in range(HEADS) if other != head]
        for x, alive in zip((out, *grads[:3]), (rows, rows, cols, cols), strict=True):
            assert x[:, :, ~alive].eq(0).all()
            assert x[:, others].isfinite().all()
            assert x[0].isfinite().all()
        assert grads[3][:, ~inside].eq(0).all()
        assert grads[3][others].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_a_nan_bias_at_padding_changes_no_bit(gradient, backend, taken):
    _, _, inside, bias, masks = padding("token masks")
    inputs, d_out = tokens(), torch.randn(2, HEADS, N, 5)
    results = []
    for filling in (0.0, torch.nan):
        filled = bias.masked_fill(~inside, filling)
        leaves = [x.clone().requires_grad_() for x in (*inputs, filled)]
        out = sinkhorn_attention(*leaves, n_iters=STEPS, gradient=gradient, backend=backend, **masks)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, d_out)))
    assert set(taken) == {2}
    for a, b in zip(*results, strict=True):
        assert a.equal(b)
        assert b.isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "native", "reference"])
@pytest.mark.parametrize(("n", "m"), [(11, 13), (37, 41)])
@pytest.mark.parametrize("steps", [STEPS, STEPS + 1])
@pytest.mark.parametrize("scattered", [False, True])
def test_the_operator_forgets_masked_entries_of_sharp_scores(backend, n, m, steps, scattered, taken):
    """NaN in the scores and in the incoming gradient where entries are masked; small matrices have their own kernel."""
    mask = (torch.arange(n) < n - 2)[:, None] & (torch.arange(m) < m - 3)
    if scattered:
        mask = mask & (torch.rand(n, m) > 0.1)
        mask[0, : m - 3], mask[: n - 2, 0] = True, True
    clean, d_clean = torch.stack([torch.randn(n, m), hub(n, m)]), torch.randn(2, n, m)
    tau = torch.tensor([0.5, 0.99], requires_grad=True)
    results = []
    for filling in (0.0, torch.nan, torch.inf):
        scores = clean.masked_fill(~mask, filling).requires_grad_()
        weights = sinkhorn(scores, n_iters=steps, tau=tau, mask=mask, backend=backend)
        d_weights = d_clean.masked_fill(~mask, filling)
        results.append((weights, *torch.autograd.grad(weights, (scores, tau), d_weights)))
    assert backend == "reference" or set(taken) == {1}
    for weights, grad, d_tau in results:
        for a, b in zip((weights, grad, d_tau), results[0], strict=True):
            assert a.equal(b)
            assert a.isfinite().all()
        assert weights[:, ~mask].eq(0).all()
        assert grad[:, ~mask].eq(0).all()


@pytest.mark.parametrize("backend", ["torch", "native", "reference"])
@pytest.mark.parametrize(("n", "m"), [(11, 13), (37, 41)])
@pytest.mark.parametrize("poisoned", ["scores", "gradient"])
def test_nan_inside_the_mask_of_sharp_scores_reaches_nothing_masked(backend, n, m, poisoned):
    mask = (torch.arange(n) < n - 2)[:, None] & (torch.arange(m) < m - 3)
    scores, d_weights = torch.stack([hub(n, m), hub(n, m)]), torch.randn(2, n, m)
    (scores if poisoned == "scores" else d_weights)[0, 1, 1] = torch.nan
    scores.requires_grad_()
    weights = sinkhorn(scores, n_iters=STEPS, mask=mask, backend=backend)
    (grad,) = torch.autograd.grad(weights, scores, d_weights)
    for result in (weights, grad):
        assert result[:, ~mask].eq(0).all()
        assert result[1].isfinite().all()
    assert (weights if poisoned == "scores" else grad)[0, 1, 1].isnan()
