"""Attention at the limit inside torch: compile, vmap, func, autocast, checkpoints, and what it saves."""

import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from sinkformers import sinkhorn_attention
from tests import limit_reference
from tests.limit_reference import BACKENDS, tokens
from tests.saved import saved_bytes

# torch's own compiler still imports what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

TOL = 1e-11
EXACT = {"atol": 1e-12, "rtol": 0}  # the same numbers by another way, some thousand roundings of order 1
VALID = torch.arange(11) < 8
CASES = {
    "plain": {},
    "padding": {"key_mask": VALID},
    "l2": {"cost": "l2"},
    "relaxed": {"tau": 0.6},
    "dropout": {"dropout_p": 0.3},
}


def limit(backend, **options):
    options = {"n_iters": math.inf, "tol": TOL, "backend": backend, **options}
    return lambda *inputs: sinkhorn_attention(*inputs, **options)


def everything(attend, inputs):
    """Output and all gradients, dropout drawn from one seed."""
    torch.manual_seed(7)
    out = attend(*inputs)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, inputs, d_out.to(out.dtype))]


def leaves(*lead, **sizes):
    return [x.requires_grad_() for x in tokens(*lead, **sizes)]


def agree(found, expected):
    for got, exact in zip(found, expected, strict=True):
        assert_close(got, exact, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_compiled_in_one_graph_it_is_the_same(case, backend):
    torch._dynamo.reset()
    attend, inputs = limit(backend, **CASES[case]), leaves(2, 3)
    agree(everything(torch.compile(attend, fullgraph=True, backend="aot_eager"), inputs), everything(attend, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learned_tau_is_compiled_too(backend):
    torch._dynamo.reset()
    inputs = [*leaves(2, 3), torch.tensor([1.0, 0.5, 0.9]).double().requires_grad_()]

    def attend(query, key, value, tau):
        return limit(backend, tau=tau)(query, key, value)

    agree(everything(torch.compile(attend, fullgraph=True, backend="aot_eager"), inputs), everything(attend, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 1, 1)], ids=str)
def test_vmap_is_a_loop(in_dims, backend):
    sizes = {"n": 7, "m": 11, "d": 5, "e": 3}
    inputs = [each if dim is not None else each[0] for each, dim in zip(tokens(3, 3, 2, **sizes), in_dims, strict=True)]
    attend = limit(backend)
    looped = torch.stack(
        [
            attend(*(x if dim is None else x.select(dim, at) for x, dim in zip(inputs, in_dims, strict=True)))
            for at in range(3)
        ]
    )
    assert_close(torch.func.vmap(attend, in_dims)(*inputs), looped, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_by_func(backend):
    inputs, attend = tokens(2, 3), limit(backend)
    grads = torch.func.grad(lambda *x: attend(*x).square().sum(), (0, 1, 2))(*inputs)
    given = [x.clone().requires_grad_() for x in inputs]
    agree(grads, torch.autograd.grad(attend(*given).square().sum(), given))
    per_sample = torch.func.vmap(torch.func.grad(lambda *x: attend(*x).square().sum(), (0, 1, 2)))(*inputs)
    agree(per_sample, grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_jacobian_is_that_of_the_reference(backend):
    query, key, value = tokens(n=3, m=4)
    found = torch.func.jacrev(limit(backend), (0, 1, 2))(query, key, value)
    exact = torch.autograd.functional.jacobian(limit_reference.attention, (query, key, value))
    for got, expected in zip(found, exact, strict=True):
        assert_close(got, expected, atol=1e3 * TOL, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_rounds_the_tokens_only(backend):
    inputs = [x.requires_grad_() for x in tokens(2, 3, dtype=torch.float32)]
    attend = limit(backend, tol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*inputs)
        d_out = torch.randn_like(out)
        inside = torch.autograd.grad(out, inputs, d_out, retain_graph=True)
    assert out.dtype == torch.bfloat16
    assert out.equal(attend(*(x.bfloat16() for x in inputs)))
    for a, b in zip(inside, torch.autograd.grad(out, inputs, d_out), strict=True):
        assert a.dtype == torch.float32
        assert a.equal(b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_compute_the_same_again(backend):
    inputs, attend = leaves(2, 3), limit(backend, dropout_p=0.3)

    def again(*inputs):
        return checkpoint(attend, *inputs, use_reentrant=False)

    agree(everything(again, inputs), everything(attend, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}, {"tau": 0.6}, {"cost": "l2"}], ids=str)
def test_no_matrix_is_saved(options, backend):
    """Inputs, output and four vectors per head are smaller than one matrix (n, m)."""
    lead, n, m, d = (2, 3), 67, 71, 5
    inputs = [x.requires_grad_() for x in tokens(*lead, n=n, m=m, d=d, e=d)]
    heads, size = math.prod(lead), 8
    vectors = heads * size * (2 * n * d + 2 * m * d + 2 * n + 2 * m) + 8 * 64  # and a few scalars, such as the seed
    assert vectors < heads * n * m * size / 2
    assert saved_bytes(lambda: limit(backend, tol=1e-3, **options)(*inputs)) <= vectors


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_refused(backend):
    inputs = leaves(2)
    (grad, *_) = torch.autograd.grad(limit(backend)(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate"):
        grad.sum().backward()
