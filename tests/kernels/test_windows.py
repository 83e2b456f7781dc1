"""Native attention under biases and masks of entries: windows, heads that share a mask, memory for some rows only."""

import pytest
import torch
from torch.testing import assert_close

import sinkformers
from sinkformers import sinkhorn_attention
from sinkformers.kernels import native
from tests import oracle
from tests.rounding import rounding

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

N, M, D, E = 150, 170, 5, 9


@pytest.fixture(params=[None, 0, 40_000, 120_000], ids=lambda size: f"workspace {size}")
def workspace(request):
    """All rows of the kernel stored, none, or some: a row of M float64 scores takes 1,360 bytes."""
    sinkformers.set_workspace_limit(request.param)
    yield
    sinkformers.set_workspace_limit(None)


@pytest.fixture(params=[1, 4], ids=lambda count: f"{count} threads")
def threads(request):
    """Four of six heads are distributed over four threads, which share the rows of the other two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def band(width):
    rows, cols = torch.arange(N)[:, None], torch.arange(M)
    return (rows * M // N - cols).abs() <= width


def blocks():
    """Packed sequences: tokens attend within theirs."""
    return torch.arange(N)[:, None] // 37 == torch.arange(M) // 43


def far_columns():
    """Every row has its first and its last valid column far apart, and columns between them are masked everywhere."""
    mask = torch.rand(N, M) < 0.3
    mask[:, 60:100] = False
    return mask


def holes():
    """A band without some rows and columns, so that the valid columns are no prefix."""
    mask = band(11)
    mask[20:31] = False
    mask[:, 50:57] = False
    mask[:, 3] = False
    return mask


WINDOWS = {
    "band": lambda: band(9),
    "one entry per row": lambda: band(0),
    "blocks": blocks,
    "far columns": far_columns,
    "holes": holes,
    "all valid": lambda: torch.ones(N, M, dtype=torch.bool),
    "one row": lambda: torch.arange(N)[:, None].expand(N, M) == 77,
    "one column": lambda: torch.arange(M).expand(N, M) == 77,
    "by sample": lambda: torch.stack([band(3), holes()])[:, None],
    "by head": lambda: torch.stack([band(3), blocks(), far_columns()]),
}


def tokens(batch=2, heads=3, dtype=torch.float64):
    lead = (batch, heads)
    return [torch.randn(*lead, *shape, dtype=dtype) for shape in ((N, D), (M, D), (M, E))]


def results(function, inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, inputs, d_out)]


def agree(call, exact, inputs, exponents=0.0):
    """Within the rounding of sums over a row, and of exponents."""
    for got, expected in zip(results(call, inputs), results(exact, inputs), strict=True):
        size = max(1.0, expected.abs().max().item())
        assert_close(got, expected, **rounding(40 * M + exponents, torch.float64, size))


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("n_iters", [1, 2, 5])
@pytest.mark.usefixtures("workspace", "threads")
def test_windows(name, n_iters):
    mask = WINDOWS[name]()
    agree(
        lambda *qkv: sinkhorn_attention(*qkv, mask, n_iters=n_iters, backend="native", allow_one_way_mask=True),
        lambda *qkv: oracle.attention(*qkv, n_iters, mask=mask),
        tokens(),
    )


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.usefixtures("workspace", "threads")
def test_a_window_with_relaxation_and_either_cost(heads, cost):
    mask, tau = holes(), torch.rand(heads, dtype=torch.float64)

    def call(tau, *qkv):
        return sinkhorn_attention(*qkv, mask, tau=tau, n_iters=4, cost=cost, backend="native", allow_one_way_mask=True)

    def exact(tau, *qkv):
        return oracle.attention(*qkv, 4, tau.expand(2, heads), mask=mask, cost=cost)

    agree(call, exact, [tau, *tokens(heads=heads)])


BIASES = {
    "by head": (1, 3, N, M),
    "by sample": (2, 1, N, M),
    "one": (1, 1, N, M),
    "each": (2, 3, N, M),
    "two axes": (N, M),
    "per key": (3, 1, M),
    "per query": (2, 1, N, 1),
    "one number": (1,),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("masked", ["none", "band", "holes", "keys"])
@pytest.mark.usefixtures("threads")
def test_biases(name, masked):
    """The gradient of a bias that several heads share is their sum, whichever of its entries are masked."""
    closed = {"none": ~band(M), "band": ~band(9), "holes": ~holes(), "keys": None}[masked]
    real = torch.arange(M) < torch.tensor([[150], [93]]) if closed is None else None

    def call(bias, *qkv):
        if closed is not None:
            bias = torch.where(closed, torch.finfo(bias.dtype).min, bias) if closed.any() else bias
        return sinkhorn_attention(*qkv, bias, n_iters=3, key_mask=real, backend="native", allow_one_way_mask=True)

    def exact(bias, *qkv):
        mask = real[:, None, None] if closed is None else ~closed
        return oracle.attention(*qkv, 3, mask=mask.expand(2, 3, N, M), bias=bias)

    agree(call, exact, [torch.randn(BIASES[name], dtype=torch.float64), *tokens()])


def test_the_gradient_of_a_shared_bias_takes_no_more_memory_than_the_bias():
    query, key, value = tokens(batch=4)
    shapes, attention_backward = [], native.attention_backward

    def watched(*args, **options):
        found = attention_backward(*args, **options)
        shapes.append(tuple(found[3].shape))
        return found

    bias = torch.randn(1, 3, N, M, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "attention_backward", watched)
        sinkhorn_attention(query, key, value, bias, n_iters=3, backend="native").sum().backward()
    assert shapes == [(1, 3, N, M)]


@pytest.mark.parametrize("shape", [(1, 3, N, M), (2, 1, N, M), (1, 1, N, M)])
def test_a_head_beyond_the_safe_range_does_not_spoil_a_shared_bias(shape):
    """Its gradient is recomputed elsewhere, and only then added to those of the others."""
    inputs = [torch.randn(shape, dtype=torch.float64), *tokens()]
    inputs[1][1, 2] *= 3000
    agree(
        lambda bias, *qkv: sinkhorn_attention(*qkv, bias, n_iters=5, backend="native"),
        lambda bias, *qkv: oracle.attention(*qkv, 5, bias=bias),
        inputs,
        # Each of five steps reads rounded exponents, and the gradient is a sum over the steps; see `oracle.tolerances`.
        exponents=(5 + 1) ** 2 * (inputs[1] @ inputs[2].mT).abs().max().item(),
    )


@pytest.mark.parametrize(
    ("lead", "shared"),
    [
        *[((), ()), ((3,), ()), ((3,), (1,)), ((3,), (3,)), ((2, 1, 3), ()), ((2, 1, 3), (3,)), ((2, 1, 3), (1, 1))],
        *[((2, 1, 3), (2, 1, 1)), ((2, 2, 3), (2, 1, 3)), ((1, 2, 2, 3), (2, 1)), ((1, 2, 2, 3), (1, 2, 1, 3))],
    ],
)
def test_biases_of_any_number_of_axes(lead, shared):
    inputs = [torch.randn(*lead, *shape, dtype=torch.float64) for shape in ((N, D), (M, D), (M, E))]
    bias = torch.randn(*shared, N, M, dtype=torch.float64)
    agree(
        lambda bias, *qkv: sinkhorn_attention(*qkv, bias, n_iters=3, backend="native"),
        lambda bias, *qkv: oracle.attention(*qkv, 3, bias=bias),
        [bias, *inputs],
    )


@pytest.mark.usefixtures("workspace", "threads")
def test_dropout_in_a_window():
    """The same weights are dropped as by the backend that computes all entries."""
    mask, inputs = holes(), tokens()

    def attend(backend):
        torch.manual_seed(5)
        return lambda *qkv: sinkhorn_attention(
            *qkv, mask, n_iters=3, dropout_p=0.4, backend=backend, allow_one_way_mask=True
        )

    found = [results(attend(backend), inputs) for backend in ("native", "torch")]
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, **rounding(40 * M, torch.float64, max(1.0, expected.abs().max().item())))


@pytest.mark.parametrize("bad", [-1, 2**63, 1.5, True, "64"])
def test_a_limit_is_a_number_of_bytes(bad):
    with pytest.raises((TypeError, ValueError), match="set_workspace_limit: size must be"):
        sinkformers.set_workspace_limit(bad)
    assert sinkformers.workspace_limit() == native.DEFAULT_WORKSPACE


def test_large_scores_are_the_same_in_backward_whether_or_not_the_bias_needs_a_gradient():
    """A float32 score of 10,000 has a unit in the last place of 1e-3: rounded otherwise, its exponential is another."""
    query, key, value = tokens(dtype=torch.float32)
    bias, found = torch.randn(1, 3, N, M), []
    for needs_gradient in (False, True):
        inputs = [x.detach().requires_grad_() for x in (3000 * query, key, value)]
        out = sinkhorn_attention(*inputs, bias.requires_grad_(needs_gradient), n_iters=4, backend="native")
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        found.append(torch.autograd.grad(out, inputs[2], d_out)[0])
    assert found[0].equal(found[1])
