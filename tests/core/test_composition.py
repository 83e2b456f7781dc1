"""The operators inside torch: opcheck, compile, vmap, func, autocast, export, and other dtypes."""

import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_attention, sinkhorn_limit

ATTENTION = {"n_iters": 3, "tau": 0.5, "query_mask": torch.arange(5) < 4, "key_mask": torch.arange(7) < 6}


def attention_inputs(*lead, dtype=torch.float32):
    return [torch.randn(*lead, n, 3, dtype=dtype, requires_grad=True) for n in (5, 7, 7)]


def record_calls(function):
    """The registered operators that a function calls, with their arguments."""
    calls = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "sinkformers":
                calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        function()
    return calls


def every_operator(matrix):
    """One call of each registered operator, backward ones included, as the public functions make it."""
    mask, tau = torch.rand(2, 5, 7) > 0.2, torch.rand(2, requires_grad=True)
    row, col = torch.rand(5).softmax(-1), torch.rand(7).softmax(-1)
    scores, bias = (matrix().requires_grad_() for _ in range(2))

    def call():
        calls_inside_compiled_graphs()
        sinkhorn(scores, mask=mask, tau=tau, row_mass=row, col_mass=col).sum().backward()
        sinkhorn(scores, backend="torch").sum().backward()
        sinkhorn(scores, n_iters=1).sum().backward()
        sinkhorn_limit(scores, tau=tau, mask=mask, row_mass=row, max_iters=51, return_info=True)[0].sum().backward()
        sinkhorn_attention(*attention_inputs(2), bias, tau=tau, cost="l2", query_mask=row > 0.1).sum().backward()
        sinkhorn_attention(*attention_inputs(2), dropout_p=0.5, backend="reference").sum().backward()
        sinkhorn_attention(*attention_inputs(2), bias, tau=tau, n_iters=math.inf).sum().backward()
        sinkhorn_attention(*attention_inputs(2), bias, tau=tau, causal="streaming").sum().backward()

    return record_calls(call)


def calls_inside_compiled_graphs():
    """Operators that only `torch.compile` calls; of the two heads, one is recomputed."""
    import sinkformers.attention.backends.traced  # noqa: F401

    query, key, value = (torch.randn(2, n, 3) for n in (5, 7, 7))
    bias, tau, queries = torch.randn(2, 5, 7), torch.rand(2), torch.arange(5)[None] < 4
    call = (query, key, value, bias, None, queries, None, tau, None, None, 3, 0.5, False, 0.0, False)
    safe, d_out, library = torch.tensor([True, False]), torch.randn(2, 5, 3), cast("Any", torch.ops.sinkformers)
    library.recompute_output(*call, torch.randn(2, 5, 3), safe)
    gradients = [torch.randn_like(x) for x in (query, key, value, bias, tau)]
    library.recompute_gradients(*call, d_out, safe, *gradients)
    library.opaque_copy(torch.ones(()), query)


MATRICES = {
    "contiguous": lambda: torch.randn(2, 5, 7),
    "transposed": lambda: torch.randn(2, 7, 5).mT,
    "half": lambda: torch.randn(2, 5, 7).bfloat16(),
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_opcheck(matrix):
    calls = every_operator(MATRICES[matrix])
    names = {func._schema.name for func, _, _ in calls}
    registered = {
        f"sinkformers::{name}"
        for name in torch._C._dispatch_get_all_op_names()
        for name in [name.removeprefix("sinkformers::").split(".")[0]]
        if f"sinkformers::{name}" in torch._C._dispatch_get_all_op_names()
    }
    assert names == registered
    for func, args, kwargs in calls:
        inputs = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
        if not func._schema.name.endswith("backward"):
            for x, original in zip(inputs, args, strict=True):
                if isinstance(x, torch.Tensor):
                    x.requires_grad_(original.requires_grad)
        torch.library.opcheck(func, tuple(inputs), kwargs)


FUNCTIONS = {
    "sinkhorn": (lambda c: sinkhorn(c, n_iters=5, tau=0.5, mask=torch.arange(7) < 6), lambda: [torch.randn(5, 7)]),
    "sinkhorn reference": (lambda c: sinkhorn(c, n_iters=5, backend="reference"), lambda: [torch.randn(5, 7)]),
    "softmax": (lambda c: sinkhorn(c, n_iters=1), lambda: [torch.randn(5, 7)]),
    "tau": (lambda c, t: sinkhorn(c, n_iters=5, tau=t), lambda: [torch.randn(5, 7), torch.rand(())]),
    "masses": (
        lambda c: sinkhorn(c, row_mass=torch.full((5,), 0.2), col_mass=torch.full((7,), 1 / 7)),
        lambda: [torch.randn(5, 7)],
    ),
    "limit": (
        lambda c: sinkhorn_limit(c, tol=1e-6, max_iters=2001, return_info=True)[0],
        lambda: [torch.randn(5, 7)],
    ),
    "attention": (lambda *x: sinkhorn_attention(*x, **ATTENTION), lambda: attention_inputs()),
    "attention softmax": (lambda *x: sinkhorn_attention(*x, n_iters=1), lambda: attention_inputs()),
    "attention reference": (
        lambda *x: sinkhorn_attention(*x, backend="reference", **ATTENTION),
        lambda: attention_inputs(),
    ),
    "attention implicit": (
        lambda *x: sinkhorn_attention(*x, gradient="implicit", cost="l2", **ATTENTION),
        lambda: attention_inputs(),
    ),
}


def gradients(function, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile_in_one_graph(name):
    function, inputs = FUNCTIONS[name]
    torch._dynamo.reset()
    values = inputs()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, values), gradients(function, values), strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_compile_with_dropout():
    torch._dynamo.reset()
    q, k, v = attention_inputs()
    compiled = torch.compile(lambda *x: sinkhorn_attention(*x, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not first.equal(second)
    first.sum().backward()
    assert q.grad.isfinite().all()


# torch's own fused SoftMax attention has no batching rule, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_a_loop(name):
    function, inputs = FUNCTIONS[name]
    batch = [inputs() for _ in range(3)]
    stacked = [torch.stack(parts).detach() for parts in zip(*batch, strict=True)]
    got = torch.vmap(function)(*stacked)
    assert_close(got, torch.stack([function(*each) for each in batch]), atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_per_sample_gradients(name):
    function, inputs = FUNCTIONS[name]
    batch = [inputs() for _ in range(3)]
    stacked = [torch.stack(parts).detach() for parts in zip(*batch, strict=True)]
    places = tuple(range(len(stacked)))
    got = torch.vmap(torch.func.grad(lambda *x: function(*x).square().sum(), argnums=places))(*stacked)
    for index, each in enumerate(batch):
        for a, b in zip(got, gradients(function, each)[1:], strict=True):
            assert_close(a[index], b, atol=1e-5, rtol=1e-4)


def test_vmap_over_one_argument_only():
    q, k, v = (x.detach() for x in attention_inputs(2))
    got = torch.vmap(lambda q: sinkhorn_attention(q, k, v, n_iters=3))(torch.stack([q, 2 * q, 3 * q]))
    assert_close(got, torch.stack([sinkhorn_attention(s * q, k, v, n_iters=3) for s in (1, 2, 3)]))
    masks = torch.rand(3, 5, 7) > 0.3
    got = torch.vmap(lambda m: sinkhorn_attention(q, k, v, m, n_iters=3))(masks)
    assert_close(got, torch.stack([sinkhorn_attention(q, k, v, m, n_iters=3) for m in masks]))


def test_vmap_with_dropout():
    q, k, v = (torch.zeros(3, n, 3) for n in (5, 7, 7))
    v = torch.eye(7).expand(3, 7, 7)
    for randomness, same in (("same", True), ("different", False)):
        attend = torch.vmap(lambda *x: sinkhorn_attention(*x, dropout_p=0.5), randomness=randomness)
        out = attend(q, k, v)
        assert out[0].equal(out[1]) == same


@pytest.mark.parametrize("name", ["sinkhorn", "attention", "softmax", "attention softmax", "limit"])
def test_export(name):
    function, inputs = FUNCTIONS[name]

    class Model(torch.nn.Module):
        def forward(self, *x):
            return function(*x)

    values = tuple(x.detach() for x in inputs())
    exported = torch.export.export(Model(), values)
    assert_close(exported.module()(*values), function(*values))


def test_autocast():
    scores = torch.randn(5, 7)
    q, k, v = attention_inputs(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert sinkhorn(scores.bfloat16(), n_iters=3).dtype == torch.float32
        assert sinkhorn(scores, n_iters=3).equal(sinkhorn(scores.float(), n_iters=3))
        assert sinkhorn(scores.double(), n_iters=3).dtype == torch.float64
        for n_iters in (1, 3):
            out = sinkhorn_attention(q, k, v, n_iters=n_iters)
            assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
            grads = torch.autograd.grad(out.float().sum(), (q, k, v))
            assert all(g.dtype == torch.float32 for g in grads)
        assert sinkhorn_attention(q.double(), k.double(), v.double()).dtype == torch.float64
    outside = sinkhorn_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), n_iters=3)
    assert out.equal(outside)


def test_the_operator_keeps_float32_inside_autocast():
    scores = 3 * torch.randn(2, 33, 33)
    outside = sinkhorn(scores, n_iters=21)
    with torch.autocast("cpu", torch.bfloat16):
        assert sinkhorn(scores, n_iters=21).equal(outside)
        assert_close(sinkhorn(scores, n_iters=21, backend="reference"), outside, atol=1e-5, rtol=0)


def test_memory_layout_does_not_matter():
    scores = torch.randn(7, 5, 3, 2).permute(3, 2, 1, 0)
    assert sinkhorn(scores).equal(sinkhorn(scores.contiguous()))
    q, k, v = (torch.randn(2, n, 3, 4).transpose(1, 2) for n in (5, 7, 7))
    assert_close(sinkhorn_attention(q, k, v), sinkhorn_attention(*(x.contiguous() for x in (q, k, v))))


def test_meta_tensors_have_shapes():
    scores = torch.empty(2, 5, 7, device="meta")
    assert sinkhorn(scores).shape == (2, 5, 7)
    q, k, v = (torch.empty(2, n, 3, device="meta") for n in (5, 7, 7))
    assert sinkhorn_attention(q, k, v).shape == (2, 5, 3)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("tau", [0.5, torch.tensor(0.5)])
def test_tau_follows_the_scores_to_their_device(backend, tau):
    """A number, or a tensor without axes, which may stay on the CPU as in torch's own operations."""
    scores = torch.empty(2, 5, 7, device="meta")
    assert sinkhorn(scores, tau=tau, backend=backend).device.type == "meta"
    q, k, v = (torch.empty(2, n, 3, device="meta") for n in (5, 7, 7))
    assert sinkhorn_attention(q, k, v, tau=tau, backend=backend).device.type == "meta"
