"""`auto` and the Triton backends on a GPU, simulated: the CPU passes for one, and torch for the kernels."""

import sys
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import sinkformers
from sinkformers import kernels as kernels_package
from sinkformers import sinkhorn, sinkhorn_attention, tune
from sinkformers.attention import attend, kernel_domain
from sinkformers.attention.backends import triton as attention_triton
from sinkformers.attention.causal import operator as causal_operator
from sinkformers.attention.causal.backends import Torch as CausalTorch
from sinkformers.attention.causal.backends import triton as causal_triton
from sinkformers.attention.causal.call import CausalAttentionResult
from sinkformers.core import normalize, unrolled
from sinkformers.core.backends import triton as core_triton
from sinkformers.core.call import NormalizeCall
from sinkformers.core.self_check import SelfChecks


class Tile(NamedTuple):
    rows: int
    cols: int


class Plan(NamedTuple):
    sums: Tile
    head_gradient: Tile | None = None


class Kernels(SimpleNamespace):
    """What `sinkformers.kernels.triton` has, in torch, with all calls counted."""

    def __init__(self):
        super().__init__(calls=[], wrong=lambda _: False, preferred=[])
        self.sizes = SimpleNamespace(
            candidates=lambda _: [Plan(Tile(64, 32)), Plan(Tile(16, 16), Tile(8, 8))],
            prefer=lambda _, plan: self.preferred.append(plan),
        )

    def attention_forward(self, call, _masked_bias):
        self.calls.append(call)
        working = call.in_working_dtype()
        out, state = kernel_domain.forward(working)
        out = out * 1.2 if self.wrong(call) else out
        first = torch.zeros_like(state.shift)[..., None, :]
        return out, torch.cat([first, state.rows], -2), state.cols

    def attention_backward(self, call, _masked_bias, *, d_out, out, needs_bias, **_saved):
        working = call.in_working_dtype()
        _, state = kernel_domain.forward(working)
        return kernel_domain.backward(working, out, state, d_out.to(out.dtype), needs_bias=needs_bias)[0]

    def block_rows(self, *_sizes):
        return 16

    def causal_forward(self, call, _masked_bias):
        self.calls.append(call)
        return CausalTorch().forward(call)[:4]

    def causal_backward(self, call, _masked_bias, *, d_out, out, starts, needs_bias):
        result = CausalAttentionResult(out, None, None, starts, None)
        return CausalTorch().backward(call, result, d_out, {"bias": needs_bias}).values()

    def tiny_forward(self, scores, tau, n_iters):
        self.calls.append(scores)
        call = NormalizeCall(scores, None, None, None, tau, n_iters)
        return unrolled.forward(call.problem(), tau, call.definition())[0]

    def tiny_backward(self, d_weights, scores, tau, n_iters):
        call = NormalizeCall(scores, None, None, None, tau, n_iters)
        problem, definition = call.problem(), call.definition()
        weights, state = unrolled.forward(problem, tau, definition)
        weights, kernel = unrolled.recompute_weights(problem, tau, definition, state)
        return unrolled.backward(problem, tau, definition, state, kernel, weights, d_weights)


@pytest.fixture
def kernels(monkeypatch):
    """A machine whose CPU is a GPU, for which the kernels were not checked yet."""
    kernels = Kernels()
    monkeypatch.setitem(sys.modules, "sinkformers.kernels.triton", kernels)
    monkeypatch.setattr(kernels_package, "triton", kernels, raising=False)
    for module in (attention_triton, causal_triton, core_triton):
        monkeypatch.setattr(module, "is_gpu", lambda _: True)
    for module in (attention_triton, core_triton):
        monkeypatch.setattr(module, "why_not_on", lambda _: None)
    for table in (attend.BACKENDS, causal_operator.BACKENDS, normalize.BACKENDS):
        others = {name: backend for name, backend in table.by_name.items() if name != "native"}
        monkeypatch.setattr(table, "by_name", others)
        monkeypatch.setattr(table, "checks", SelfChecks())
        monkeypatch.setattr(table, "winners", {})
    monkeypatch.setattr("sinkformers.core.backend._WARNED", set())
    return kernels


def tokens(n=50, m=60, width=8, dtype=torch.float32, **options):
    return [torch.randn(2, 3, size, width, dtype=dtype, **options) for size in (n, m, m)]


OPTIONS = {
    "plain": {},
    "once": {"n_iters": 1, "tau": torch.tensor(0.5)},
    "even": {"n_iters": 4},
    "many": {"n_iters": 22},
    "bias": {"attn_mask": torch.randn(3, 50, 60)},
    "bias of keys": {"attn_mask": torch.randn(2, 1, 1, 60), "tau": torch.rand(3)},
    "window": {"attn_mask": torch.rand(50, 60) < 0.7},
    "padding": {"query_mask": torch.arange(50) < 40, "key_mask": torch.arange(60) < 51},
    "dropout": {"dropout_p": 0.3},
    "l2": {"cost": "l2"},
    "implicit": {"gradient": "implicit"},
    "streaming": {"causal": "streaming"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_calls_of_every_kind_are_checked_and_served(kernels, options, dtype):
    inputs = tokens(dtype=dtype, requires_grad=True)
    assert sinkformers.backend_for(*inputs, **OPTIONS[options]) == "triton"
    (small,) = kernels.calls
    assert max(small.query.shape[-2], small.key.shape[-2]) <= (137 if options == "streaming" else 64)
    assert small.query.dtype == (torch.float32 if options == "l2" else dtype)
    sinkhorn_attention(*inputs, **OPTIONS[options]).square().sum().backward()
    assert len(kernels.calls) == 2
    assert all(x.grad is not None for x in inputs)


def test_what_the_kernels_cannot_serve_is_not_checked(kernels):
    for inputs in (tokens(dtype=torch.float64), tokens(width=257)):
        assert sinkformers.backend_for(*inputs) == "torch"
    assert sinkformers.backend_for(*tokens(), n_iters=torch.inf) in ("native", "torch")
    assert sinkformers.backend_for(*tokens(), n_iters=1) == "sdpa"
    assert kernels.calls == []


def test_the_causal_triangle(kernels):
    query, _, _ = tokens()
    assert sinkformers.backend_for(query, query, query, is_causal=True) == "triton"
    assert kernels.calls[0].triangle


@pytest.mark.parametrize("n_iters", [2, 3, 21])
def test_small_matrices(kernels, n_iters):
    for shape in ((2, 5, 7), (1000, 4, 4), (64, 64)):
        kernels.calls.clear()
        weights = sinkhorn(torch.randn(shape), n_iters=n_iters)
        assert weights.shape == shape
        assert len(kernels.calls) == 2
        padded = [[core_triton.power_of_two(size) for size in call.shape[-2:]] for call in kernels.calls]
        assert padded[0] == padded[1]  # which is what kernels are compiled for
    kernels.calls.clear()
    sinkhorn(torch.randn(3, 65, 65), n_iters=n_iters)
    assert kernels.calls == []


def test_short_sequences_have_kernels_of_their_own(kernels):
    """Where the kernel that holds a whole head is wrong, the passes over tiles still serve."""
    kernels.wrong = lambda call: call.query.shape[-2] <= 64 and call.key.shape[-2] <= 64
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {n: sinkformers.backend_for(*tokens(n, n)) for n in (33, 64, 65, 256, 257, 1000)}
    assert found == {33: "torch", 64: "torch", 65: "triton", 256: "triton", 257: "triton", 1000: "triton"}
    assert len(caught) == 1
    seen = {tuple(call.query.shape[-2:]) for call in kernels.calls}
    assert all(max(shape) < 300 for shape in seen)


def test_tile_sizes_are_choices_of_tune(kernels):
    found = tune(*tokens(), seconds=0.01)
    names = [candidate.choice for candidate in found.candidates if candidate.backend == "triton"]
    assert names == ["sums 64×32", "sums 16×16, head gradient 8×8"]
    if found.backend == "triton":
        assert attention_triton._name(kernels.preferred[-1]) == found.choice


def test_kernels_launch_on_the_device_of_the_tensors():
    """Triton launches on the current device, which need not be that of the tensors."""
    guard = core_triton.launching_on(torch.device("cuda", 3))
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 3


def test_auto_does_not_take_them_on_the_cpu():
    assert not core_triton.is_gpu(torch.device("cpu"))
    assert not core_triton.is_gpu(torch.device("meta"))
    assert core_triton.is_gpu(torch.device("cuda", 1))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("n", [50, 300])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_region_has_the_verdict_that_is_known(kernels, dynamic, n):
    """Torch's operations before, the operator after; no check inside. Lengths may vary."""
    inputs = tokens(n, n)
    compiled = torch.compile(sinkhorn_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch._dynamo.reset()
    expected = sinkhorn_attention(*inputs, backend="torch")
    assert compiled(*inputs).allclose(expected, atol=1e-5)
    assert kernels.calls == []
    sinkhorn_attention(*inputs)
    kernels.calls.clear()
    torch._dynamo.reset()
    assert compiled(*inputs).allclose(expected, atol=1e-5)
    assert len(kernels.calls) == 1
