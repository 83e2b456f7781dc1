"""Attention at the limit: masked and broken tokens, heads that do not converge, empty calls and wrong arguments."""

import math
import warnings

import numpy
import pytest
import torch
from torch.testing import assert_close

from sinkformers import ConvergenceWarning, backend_for, sinkhorn, sinkhorn_attention
from sinkformers.attention.functional import attention_with_evidence
from tests.limit_reference import BACKENDS, tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", [1.0, 0.6])
def test_masked_tokens_change_nothing(tau, backend):
    """NaN and infinity included; their own gradients are exact zeros."""
    queries, keys = torch.arange(7) != 2, torch.arange(11) < torch.tensor([[8], [11]])
    sides = [queries[:, None], keys[:, None, :, None], keys[:, None, :, None]]
    inputs, d_out = tokens(2, 3), torch.randn(2, 3, 7, 3).double()
    found = []
    for fill in (0.0, math.nan, math.inf):
        given = [torch.where(side, x, fill).requires_grad_() for x, side in zip(inputs, sides, strict=True)]
        options = {"n_iters": math.inf, "tau": tau, "query_mask": queries, "key_mask": keys, "backend": backend}
        out = sinkhorn_attention(*given, **options)
        d_out[..., 2, :] = fill  # the gradient of what a masked query gives is not read
        found.append([out, *torch.autograd.grad(out, given, d_out)])
    assert found[0][0][..., 2, :].eq(0).all()
    for grad, side in zip(found[0][1:], sides, strict=True):
        assert grad.masked_select(~side.expand_as(grad)).eq(0).all()
        assert grad.masked_select(side.expand_as(grad)).ne(0).all()
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_head(backend):
    query, key, value = (2 * x for x in tokens(4))
    settings = {"n_iters": math.inf, "tol": 1e-6, "backend": backend}
    plain, before = attention_with_evidence(query, key, value, **settings)
    query = query.clone()
    query[2, 3, 1] = math.nan
    with pytest.warns(ConvergenceWarning, match=r"1 of 4 heads are NaN, because they hold NaN or plus infinity\.$"):
        out, after = attention_with_evidence(query, key, value, **settings)
    others = torch.tensor([True, True, False, True])
    assert out[2].isnan().all()
    assert out[others].equal(plain[others])
    assert before.converged.all()
    assert after.converged.equal(others)
    assert after.products[others].equal(before.products[others])
    assert after.residual[others].equal(before.residual[others])
    assert after.residual[2].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_head_with_nan_reaches_no_other_head(backend):
    inputs = tokens(4)
    grads = []
    for broken in (False, True):
        query, key, value = (x.clone() for x in inputs)
        if broken:
            query[2, 3, 1] = math.nan
        given = [x.requires_grad_() for x in (query, key, value)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            out = sinkhorn_attention(*given, n_iters=math.inf, backend=backend)
        grads.append(torch.autograd.grad(out, given, torch.ones_like(out)))
    others = torch.tensor([True, True, False, True])
    for plain, found in zip(*grads, strict=True):
        assert found[others].equal(plain[others])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_iters", [1, 2, 5, 30])
def test_heads_that_do_not_converge_give_one_warning(max_iters, backend):
    """Values that are the identity show the weights: rows sum to 1, and the worst column is named."""
    query, key, value = tokens(2, 3, n=13, m=13)
    value = torch.eye(13).double().expand(2, 3, 13, 13)
    query[0, 0] = 0  # converges at once
    query[0, 1:] *= 20
    query[1] *= 20
    settings = {"n_iters": math.inf, "max_iters": max_iters, "backend": backend}
    message = r"sinkhorn_attention: 5 of 6 heads have not converged after \d+ products; .* tolerance 0\.001\. Raise"
    with pytest.warns(ConvergenceWarning, match=message) as seen:
        weights, evidence = attention_with_evidence(query, key, value, **settings)
    assert len(seen) == 1
    assert evidence.converged.sum() == 1
    assert (evidence.products <= max(1, max_iters)).all()
    assert_close(weights.sum(-1), torch.ones(2, 3, 13).double(), atol=1e-14, rtol=0)
    worst = (weights.sum(-2) - 1).abs().amax(-1)
    assert_close(evidence.residual, worst, atol=1e-10, rtol=0)
    assert f"the largest residual is {worst.max():.2g}" in str(seen[0].message)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", [1.0, 0.6])
@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-6])
def test_the_residual_is_that_of_the_column_sums(tol, tau, backend):
    """For tau < 1 relative to `t·exp((1 − 1/τ)·g)`, which the column potentials g of the weights determine."""
    query, key, value = tokens(5, n=13, m=9)
    value = torch.eye(9).double().expand(5, 9, 9)
    settings = {"n_iters": math.inf, "tol": tol, "tau": tau, "backend": backend}
    weights, evidence = attention_with_evidence(query, key, value, **settings)
    assert evidence.converged.all()
    assert (evidence.residual <= tol).all()
    if tau == 1:
        worst = (weights.sum(-2) / (13 / 9) - 1).abs().amax(-1)
    else:
        g = evidence.lift + evidence.v.log()
        worst = (weights.sum(-2) / (13 / 9 * (g * (1 - 1 / tau)).exp()) - 1).abs().amax(-1)
    assert_close(evidence.residual, worst, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_calls_and_softmax_have_no_evidence(backend):
    inputs = tokens(2)
    for options in ({"n_iters": 3}, {"n_iters": math.inf, "tau": 0.0}):
        out, evidence = attention_with_evidence(*inputs, backend=backend, **options)
        assert evidence is None
        assert out.equal(sinkhorn_attention(*inputs, backend=backend, **options))


def test_the_limit_at_tau_zero_is_softmax():
    inputs = tokens(2)
    assert backend_for(*inputs, n_iters=math.inf, tau=0.0) == "sdpa"
    expected = sinkhorn_attention(*inputs, n_iters=1)
    assert sinkhorn_attention(*inputs, n_iters=math.inf, tau=0.0).equal(expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("infinity", [numpy.inf, numpy.float32("inf"), numpy.float64("inf")], ids=repr)
def test_any_infinity_is_the_limit(infinity, backend):
    inputs = tokens(2)
    assert backend_for(*inputs, n_iters=infinity, backend=backend) == backend
    expected = sinkhorn_attention(*inputs, n_iters=math.inf, backend=backend)
    assert sinkhorn_attention(*inputs, n_iters=infinity, backend=backend).equal(expected)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("shape", [(0, 7, 11, 3), (2, 0, 11, 3), (2, 7, 0, 3), (2, 7, 11, 0)], ids=str)
def test_empty_calls(shape, backend):
    *lead, n, m, e = shape
    tau = torch.full(lead, 0.5).double().requires_grad_()
    inputs = [x.requires_grad_() for x in tokens(*lead, n=n, m=m, e=e)]
    out = sinkhorn_attention(*inputs, n_iters=math.inf, tau=tau, backend=backend)
    assert out.shape == (*lead, n, e)
    assert out.eq(0).all()
    assert all(grad.eq(0).all() for grad in torch.autograd.grad(out.sum(), [*inputs, tau]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_wholly_masked_heads_give_zeros(backend):
    inputs, valid = [x.requires_grad_() for x in tokens(2, 3)], torch.tensor([[True], [False]]).expand(2, 11)
    out = sinkhorn_attention(*inputs, n_iters=math.inf, key_mask=valid, backend=backend)
    assert out[1].eq(0).all()
    assert out[0].ne(0).all()
    grads = torch.autograd.grad(out.square().sum(), inputs)
    assert all(grad[1].eq(0).all() and grad.isfinite().all() for grad in grads)


WHOLE = r"n_iters must be a whole number ≥ 1 \(1 is SoftMax, odd counts end on rows\) or math\.inf; got "
OF_BOTH = {"n_iters", "tol"}
WRONG = [
    ({"n_iters": math.nan}, ValueError, WHOLE + "nan"),
    ({"n_iters": -math.inf}, ValueError, WHOLE + "-inf"),
    ({"n_iters": 2.5}, ValueError, WHOLE + r"2\.5"),
    ({"n_iters": "inf"}, TypeError, WHOLE + "'inf'"),
    ({"n_iters": torch.tensor(math.inf)}, TypeError, WHOLE + r"tensor\(inf\)"),
    ({"tol": 0.0}, ValueError, r"tol must lie between 0 and 1, .*got 0\.0"),
    ({"tol": 1.0}, ValueError, r"tol must lie between 0 and 1, .*got 1\.0"),
    ({"tol": math.nan}, ValueError, r"tol must lie between 0 and 1, .*got nan"),
    ({"tol": -1e-3}, ValueError, r"tol must lie between 0 and 1, .*got -0\.001"),
    ({"tol": "1e-3"}, TypeError, r"tol must be a number between 0 and 1; got '1e-3'"),
    ({"tol": True}, TypeError, r"tol must be a number between 0 and 1; got True"),
    ({"tol": 1e-3, "n_iters": 3}, ValueError, r"tol goes with n_iters=math\.inf.*tol=0\.001 and n_iters=3\. Leave one"),
    (
        {"max_iters": 9, "n_iters": 3},
        ValueError,
        r"max_iters goes with n_iters=math\.inf; got max_iters=9 and n_iters=3",
    ),
    ({"max_iters": 0}, ValueError, r"max_iters must be a whole number ≥ 1 .*got 0"),
    ({"max_iters": 2.5}, ValueError, r"max_iters must be a whole number ≥ 1 .*got 2\.5"),
    ({"max_iters": math.inf}, ValueError, r"max_iters must be a whole number ≥ 1 .*got inf"),
    ({"max_iters": "9"}, TypeError, r"max_iters must be a whole number ≥ 1 .*got '9'"),
    ({"gradient": "unrolled"}, ValueError, r'gradient="unrolled" is that of a finite number of steps; got n_iters'),
    ({"gradient": "exact"}, ValueError, r"gradient must be one of 'unrolled', 'implicit'; got 'exact'"),
    ({"tau": torch.zeros(2)}, ValueError, r"needs tau in \(0, 1\]"),
    ({"is_causal": True}, ValueError, r"causal attention needs an odd, finite n_iters.*got inf"),
    ({"attn_mask": torch.ones(11, 11).tril().bool()}, NotImplementedError, "attn_mask must not order the tokens"),
    ({"backend": "reference"}, NotImplementedError, "it has the unrolled gradient only"),
    ({"backend": "triton"}, NotImplementedError, "its kernels take a finite n_iters"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=f"sinkhorn_attention: .*{message}"):
        sinkhorn_attention(*tokens(2, n=11), **{"n_iters": math.inf, **options})


@pytest.mark.parametrize(("options", "error", "message"), [each for each in WRONG if set(each[0]) <= OF_BOTH])
def test_the_operator_refuses_the_same(options, error, message):
    with pytest.raises(error, match=f"sinkhorn: {message}"):
        sinkhorn(torch.randn(5, 7), **{"n_iters": math.inf, **options})
