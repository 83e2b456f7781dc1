"""Half precision goes in and comes out, and costs no more than that: the rounding of inputs, outputs and gradients."""

import math

import pytest
import torch

from sinkformers import sinkhorn_attention
from sinkformers.kernels import native
from tests import oracle
from tests.saved import saved_bytes

HALVES = [torch.float16, torch.bfloat16]


def tokens(dtype, std, n=47, m=53, d=16, e=24):
    query, key, value, d_out = (torch.randn(2, 3, *shape) for shape in ((n, d), (m, d), (m, e), (n, e)))
    return [(std * query).to(dtype), key.to(dtype), value.to(dtype)], d_out.to(dtype)


def results(attend, inputs, d_out):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def eager_softmax(query, key, value):
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def exact(function, inputs, d_out):
    return results(function, [x.double() for x in inputs], d_out.double())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("std", [1, 4, 8, 16, 30])
@pytest.mark.parametrize("n_iters", [2, 3, 21])
@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_the_error_is_that_of_rounding_the_result(dtype, std, n_iters, backend):
    """Within twice the error of the exact result rounded to half precision, and of eager SoftMax attention.

    Inside, everything is float32, whose errors are hundreds of times smaller than that rounding unless they are
    magnified. Sharp scores magnify: the gradient of a score is a difference of two nearly equal numbers.
    """
    inputs, d_out = tokens(dtype, std)
    got = results(lambda *x: sinkhorn_attention(*x, n_iters=n_iters, backend=backend), inputs, d_out)
    true = exact(lambda *x: oracle.attention(*x, n_iters), inputs, d_out)
    eager, true_softmax = results(eager_softmax, inputs, d_out), exact(eager_softmax, inputs, d_out)
    for ours, right, theirs, softmax in zip(got, true, eager, true_softmax, strict=True):
        assert ours.dtype == dtype
        assert error(ours, right) <= 2 * error(right.to(dtype), right)
        assert error(ours, right) <= 2 * error(theirs, softmax)


def error(found, right):
    return ((found.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_bias_and_tau_get_gradients_as_good(dtype, backend):
    inputs, d_out = tokens(dtype, 8)
    bias = torch.randn(1, 3, 47, 53).to(dtype)
    tau = torch.tensor([[[0.3], [0.7], [1.0]]], dtype=dtype)[..., 0]

    def attend(query, key, value, bias, tau):
        return sinkhorn_attention(query, key, value, bias, tau=tau, n_iters=5, backend=backend)

    got = results(attend, [*inputs, bias, tau], d_out)
    true = exact(lambda q, k, v, b, t: oracle.attention(q, k, v, 5, t, bias=b), [*inputs, bias, tau], d_out)
    for ours, right in zip(got, true, strict=True):
        assert error(ours, right) <= 2 * max(error(right.to(dtype), right), torch.finfo(dtype).eps / 4)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_saved_for_backward(dtype):
    """Inputs, the output in float32, and one vector per step: no matrix."""
    query, key, value = (torch.randn(1, 2, 256, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    saved = saved_bytes(lambda: sinkhorn_attention(query, key, value, n_iters=5))
    vectors = 2 * 256 * (5 + 1) * 4
    assert saved <= query.nbytes * 3 + query.nbytes * 2 + vectors + 64


@pytest.fixture
def products_in_bfloat16():
    """`results` with an instruction set: products of bfloat16 tokens in float32, or the default here, in bfloat16."""
    if native.missing() is not None or native.use_instruction_set("avx512_bf16") != "avx512_bf16":
        pytest.skip("this processor has no products in bfloat16")
    threads, workspace = torch.get_num_threads(), native.workspace_limit()

    def results_by(instruction_set, attend, inputs, d_out):
        assert native.use_instruction_set(instruction_set) == instruction_set
        return results(attend, inputs, d_out)

    yield results_by
    native.use_instruction_set("avx512_bf16")
    native.set_workspace_limit(workspace)
    torch.set_num_threads(threads)


def window(n, reach):
    places = torch.arange(n)
    return (places[:, None] - places).abs() <= reach


PAIR_CALLS = {
    "plain": {},
    "even steps": {"n_iters": 4},
    "softmax": {"n_iters": 1},
    "keys": {"key_mask": torch.arange(131) % 3 > 0},
    "queries": {"query_mask": torch.arange(131) % 4 > 0},
    "window": {"attn_mask": window(131, 9)},
    "dropout": {"dropout_p": 0.3},
    "relaxed": {"tau": 0.6},
}


@pytest.mark.parametrize("workspace", [0, 100_000, native.DEFAULT_WORKSPACE])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", PAIR_CALLS)
def test_products_in_bfloat16_round_gradients_of_tokens_once_more(products_in_bfloat16, name, threads, workspace):
    """Beside the products in float32, for a team of threads that shares heads and for rows that are computed again."""
    n, options = 131, {"n_iters": 5, **PAIR_CALLS[name]}
    torch.set_num_threads(threads)
    native.set_workspace_limit(workspace)
    query, key, value, d_out = (torch.randn(1, n, 3, width).bfloat16().transpose(1, 2) for width in (33, 33, 17, 17))
    inputs = [4 * query, key, value]

    def attend(query, key, value):
        torch.manual_seed(3)
        return sinkhorn_attention(query, key, value, backend="native", **options)

    pairs, singles = (products_in_bfloat16(name, attend, inputs, d_out) for name in ("avx512_bf16", "avx512"))
    true = exact(attend, inputs, d_out)
    for at, (ours, float32, right) in enumerate(zip(pairs, singles, true, strict=True)):
        of_tokens = at in (1, 2)  # the gradients of query and key
        assert error(ours, right) <= (2 if of_tokens else 1.05) * error(right.bfloat16(), right)
        assert not (of_tokens and torch.equal(ours, float32)), "products in float32 served"


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 33, 64, 65])
@pytest.mark.parametrize("m", [1, 16, 33, 95])
def test_products_in_bfloat16_of_every_remainder(products_in_bfloat16, n, m):
    """Entry by entry: what rounding the gradient of the scores, and then the result, can do."""
    unit = torch.finfo(torch.bfloat16).eps / 2
    for d, e in ((1, 1), (2, 31), (16, 16), (33, 65)):
        inputs, d_out = tokens(torch.bfloat16, 2, n, m, d, e)
        inputs.append(torch.randn(2, 3, n, m).bfloat16())

        def attend(query, key, value, bias):
            return sinkhorn_attention(query, key, value, bias, n_iters=4, backend="native")

        ours = products_in_bfloat16("avx512_bf16", attend, inputs, d_out)
        right = exact(attend, inputs, d_out)
        query, key, d_scores = inputs[0].double(), inputs[1].double(), right[4] / d**0.5
        rounded = [0, d_scores.abs() @ key.abs(), d_scores.abs().mT @ query.abs(), 0, 0]
        for got, expected, moved in zip(ours, right, rounded, strict=True):
            off = (got.double() - expected).abs()
            assert (off <= 1.01 * unit * (moved + expected.abs()) + 4e-5).all()


@pytest.mark.parametrize(
    "options", [{"cost": "l2"}, {"scale": -0.1}, {"scale": 0.0}, {"n_iters": math.inf}, {"causal": "streaming"}]
)
def test_calls_without_products_in_bfloat16(products_in_bfloat16, options):
    inputs, d_out = tokens(torch.bfloat16, 2, 40, 40)

    def attend(*x):
        return sinkhorn_attention(*x, backend="native", **{"n_iters": 3, **options})

    both = [products_in_bfloat16(name, attend, inputs, d_out) for name in ("avx512_bf16", "avx512")]
    for ours, float32 in zip(*both, strict=True):
        assert torch.equal(ours, float32)
