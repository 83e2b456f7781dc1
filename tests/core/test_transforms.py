"""The operators under transformations of the program around them: changing numbers, vmap, forward mode, autocast."""

import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd import gradcheck
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_attention, sinkhorn_limit

SCORES = 3 * torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
TOKENS = [torch.randn(2, n, 3, generator=torch.Generator().manual_seed(n)) for n in (5, 7, 7)]

# torch scripts some derivatives when forward mode is first entered, and warns about its own doing.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

NUMBERS = {
    "n_iters": (lambda x: sinkhorn(SCORES, n_iters=x), (3, 5, 8)),
    "tau": (lambda x: sinkhorn(SCORES, tau=x), (0.3, 0.5, 0.7)),
    "attention n_iters": (lambda x: sinkhorn_attention(*TOKENS, n_iters=x), (3, 5, 8)),
    "attention tau": (lambda x: sinkhorn_attention(*TOKENS, tau=x), (0.3, 0.5, 0.7)),
    "attention scale": (lambda x: sinkhorn_attention(*TOKENS, scale=x), (0.3, 0.5, 0.7)),
    "limit max_iters": (lambda x: sinkhorn_limit(SCORES, max_iters=x, return_info=True)[0], (3, 5, 9)),
    "limit tol": (lambda x: sinkhorn_limit(SCORES, tol=x, return_info=True)[0], (0.3, 0.1, 0.01)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_compiled_graph_takes_changing_numbers(name):
    """From the second value on a number is symbolic: whatever reads it has to be traceable."""
    function, values = NUMBERS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for value in values:
        assert compiled(value).equal(function(value))


@pytest.mark.parametrize("max_iters", [3, 1001])
def test_the_limit_goes_through_transforms_without_a_word(max_iters):
    """Nothing there can look at the values, so there is no warning either."""
    scores = SCORES[0]

    def normalise(c):
        return sinkhorn_limit(c, max_iters=max_iters)

    expected = torch.stack([sinkhorn_limit(c, max_iters=max_iters, return_info=True)[0] for c in SCORES])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(torch.vmap(normalise)(SCORES), expected, atol=1e-6, rtol=0)
        torch._dynamo.reset()
        compiled = torch.compile(normalise, fullgraph=True, backend="aot_eager")
        assert_close(compiled(scores), expected[0], atol=1e-6, rtol=0)
        per_sample = torch.vmap(torch.func.grad(lambda c: normalise(c).square().sum()))(SCORES)
        assert normalise(torch.empty(5, 7, device="meta")).shape == (5, 7)
    leaf = SCORES.clone().requires_grad_()
    sinkhorn_limit(leaf, max_iters=max_iters, return_info=True)[0].square().sum().backward()
    assert_close(per_sample, leaf.grad, atol=1e-5, rtol=1e-4)


@forward_mode
def test_softmax_has_a_forward_mode_derivative():
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2], mask[:, 3] = False, False
    scores = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"mask": mask}):
        gradcheck(lambda c: sinkhorn(c, n_iters=1, **options), scores, check_forward_ad=True)  # noqa: B023


@forward_mode
def test_the_reference_has_a_forward_mode_derivative():
    scores = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    gradcheck(lambda c, t: sinkhorn(c, tau=t, backend="reference"), (scores, tau), check_forward_ad=True)


@forward_mode
@pytest.mark.parametrize(
    "function",
    [
        lambda c: sinkhorn(c, n_iters=3),
        lambda c: sinkhorn(c, n_iters=3, backend="torch"),
        lambda c: sinkhorn_limit(c, return_info=True)[0],
        lambda c: sinkhorn_attention(c, *[x[0] for x in TOKENS[1:]]),
    ],
)
def test_the_others_say_that_they_have_none(function):
    point = TOKENS[0][0]
    with pytest.raises(NotImplementedError, match=r'no forward-mode derivative .*jacrev.* backend="reference" have'):
        torch.func.jvp(function, (point,), (point,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        function(forward_ad.make_dual(point, point))
    torch._dynamo.reset()
    compiled = torch.compile(lambda c: torch.func.jvp(function, (c,), (c,)), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="no forward-mode derivative"):
        compiled(point)
    assert torch.func.jacrev(function)(point).isfinite().all()


@pytest.mark.parametrize(
    "function",
    [
        lambda c, t: sinkhorn(c, n_iters=9, tau=t, backend="torch"),
        lambda c, _t: sinkhorn(c, n_iters=1),
        lambda c, t: sinkhorn_limit(c, tau=t, max_iters=101, return_info=True)[0],
        lambda c, t: sinkhorn_attention(c, *TOKENS[1:], n_iters=9, tau=t, backend="torch"),
        lambda c, t: sinkhorn_attention(c, *TOKENS[1:], n_iters=9, tau=t, gradient="implicit", backend="torch"),
    ],
    ids=["unrolled", "softmax", "limit", "attention", "attention implicit"],
)
def test_backward_inside_autocast_changes_no_bit(function):
    grads = []
    for enabled in (False, True):
        scores, tau = TOKENS[0].clone().requires_grad_(), torch.tensor(0.7, requires_grad=True)
        out = function(scores, tau)
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out.backward(d_out)
        grads.append((scores.grad, torch.zeros(()) if tau.grad is None else tau.grad))
    for outside, inside in zip(*grads, strict=True):
        assert inside.equal(outside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tau_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_come_in_the_dtype_of_their_tensor(dtype, tau_dtype):
    scores, tau = SCORES.to(dtype), torch.tensor([0.5, 0.75], dtype=tau_dtype)

    def limit(c, t):
        return sinkhorn_limit(c, tau=t, max_iters=21, return_info=True)[0]

    for function in (limit, lambda c, t: sinkhorn(c, tau=t), lambda c, t: sinkhorn(c, tau=t, backend="torch")):
        out, pull = torch.func.vjp(function, scores, tau)
        d_scores, d_tau = pull(torch.ones_like(out))
        assert (out.dtype, d_scores.dtype, d_tau.dtype) == (dtype, dtype, tau_dtype)
        assert d_tau.shape == (2,)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_batched_gradients_of_autograd(backend):
    """`is_grads_batched=True` has a vmap of its own, which `torch.func` knows nothing of."""
    scores, tokens = SCORES.double(), [x.double() for x in TOKENS]
    for function in (
        lambda x, backend: sinkhorn(x, backend=backend),
        lambda x, backend: sinkhorn(x, n_iters=1, backend=backend),
        lambda x, backend: sinkhorn_attention(*tokens, x, tau=0.5, backend=backend),
    ):
        got = torch.autograd.functional.jacobian(lambda x, f=function: f(x, backend), scores, vectorize=True)
        assert_close(got, torch.autograd.functional.jacobian(lambda x, f=function: f(x, "reference"), scores))
