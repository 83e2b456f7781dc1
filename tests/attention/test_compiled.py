"""The torch backend inside `torch.compile`: taken apart, and still what it is outside."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from tests import oracle
from tests.saved import saved_bytes

# torch's own compiler still imports what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

N, M = 11, 13
CASES = {
    "plain": {},
    "even": {"n_iters": 4},
    "many": {"n_iters": 21},
    "once": {"n_iters": 1},
    "l2": {"cost": "l2"},
    "padding": {"query_mask": torch.arange(N) % 5 > 0, "key_mask": torch.arange(M) % 4 > 0},
    "window": {"attn_mask": (torch.arange(N)[:, None] - torch.arange(M)).abs() < 4},
    "dropout": {"dropout_p": 0.4},
    "dropout and padding": {"dropout_p": 0.4, "key_mask": torch.arange(M) % 4 > 0, "tau": 0.5},
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def tokens(n=N, m=M, dtype=torch.float64):
    shapes = ((2, 3, n, 5), (2, 3, m, 5), (2, 3, m, 7))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def everything(attend, inputs):
    """Output and all gradients, dropout drawn from one seed."""
    torch.manual_seed(7)
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, dtype=torch.float64).to(out.dtype))]


def recorded(function):
    """The function compiled in one graph, and the names of the operators in its forward and backward graphs."""
    names = []

    def keep(graph, _inputs):
        names.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)), names


@pytest.mark.parametrize("case", CASES)
def test_taken_apart_it_is_the_same(case):
    options = {"n_iters": 5, "backend": "torch", **CASES[case]}
    inputs = tokens()
    for option in ("key_mask", "query_mask"):
        if option in options:  # NaN in padding must have no effect here either
            dead = ~options[option]
            places = (1, 2) if option == "key_mask" else (0,)
            for place in places:
                inputs[place].data[:, :, dead] = torch.nan
    compiled, names = recorded(lambda *x: sinkhorn_attention(*x, **options))
    got = everything(compiled, inputs)
    expected = everything(lambda *x: sinkhorn_attention(*x, **options), inputs)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, atol=1e-12, rtol=0)
    assert len(names) == 2
    assert all("aten.bmm.default" in graph and not any("attend" in name for name in graph) for graph in names)


def test_bias_and_tau_are_differentiated():
    bias = torch.randn(3, N, M, dtype=torch.float64)
    bias[1, :, 4] = -torch.inf
    inputs = [*tokens(), bias.requires_grad_(), torch.tensor([0.3, 0.7, 1.0], dtype=torch.float64, requires_grad=True)]

    def attend(q, k, v, b, t):
        return sinkhorn_attention(q, k, v, b, n_iters=5, tau=t, backend="torch")

    compiled, _ = recorded(attend)
    doubles = [x.detach().requires_grad_() for x in inputs]
    exact = oracle.attention(*doubles[:3], 5, doubles[4], doubles[3] > -torch.inf, doubles[3])
    d_out = torch.randn(exact.shape, dtype=torch.float64)
    expected = torch.autograd.grad(exact, doubles, d_out)
    for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs, d_out), expected, strict=True):
        assert_close(a, b.nan_to_num(0.0), atol=1e-10, rtol=0)


def test_unsafe_heads_fall_back_to_the_log_domain():
    hub = torch.full((64, 64), -1000.0)
    hub[0], hub[:, :32] = 0, 0
    bias = torch.stack([torch.zeros(64, 64), hub + 0.3 * torch.randn(64, 64), torch.zeros(64, 64)])
    inputs = tokens(64, 64, torch.float32)

    def attend(q, k, v):
        return sinkhorn_attention(q, k, v, bias, dropout_p=0.2, n_iters=51, backend="torch")

    compiled, _ = recorded(attend)
    for a, b in zip(everything(compiled, inputs), everything(attend, inputs), strict=True):
        assert a.isfinite().all()
        # The same operations in float32 but for the order of sums; the errors of 51 steps may add up in each.
        assert_close(a, b, atol=52 * 64**0.5 * 1.2e-7 * max(1.0, b.abs().max().item()), rtol=0)


def test_lengths_may_vary():
    compiled = torch.compile(
        lambda *x: sinkhorn_attention(*x, n_iters=3, backend="torch"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n, m in ((5, 7), (11, 13), (17, 3)):
        inputs = tokens(n, m)
        expected = everything(lambda *x: sinkhorn_attention(*x, n_iters=3, backend="reference"), inputs)
        for a, b in zip(everything(compiled, inputs), expected, strict=True):
            assert_close(a, b, atol=1e-12, rtol=0)


def test_inductor_saves_no_matrix():
    """One graph for all it has to get right, since it takes its time."""
    inputs = [torch.randn(2, 3, n, 16, requires_grad=True) for n in (131, 137, 137)]
    masks = {"query_mask": torch.arange(131) < 120, "key_mask": torch.arange(137) < 101}

    def attend(*x):
        return sinkhorn_attention(*x, dropout_p=0.1, n_iters=3, backend="torch", **masks)

    # Left to itself inductor draws other numbers than torch, and so another seed.
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, options={"fallback_random": True})
    for a, b in zip(everything(compiled, inputs), everything(attend, inputs), strict=True):
        # The same operations in float32 but for the order of sums, over three steps and a product at either end.
        assert_close(a, b, atol=5 * 137**0.5 * 1.2e-7 * max(1.0, b.abs().max().item()), rtol=0)
    # Inputs, output, and perhaps the scaled queries; one vector per step, row maxima and perhaps one more.
    allowed = 5 * inputs[1].nbytes + 10 * 137 * 6 * 4
    assert saved_bytes(lambda: compiled(*inputs)) < allowed < 131 * 137 * 6 * 4
