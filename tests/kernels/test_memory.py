"""What the compiled kernels read and write: memory that is held until they return, and nothing beside it."""

import ast
import ctypes
import gc
import struct
import weakref
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import sinkformers
from sinkformers import sinkhorn, sinkhorn_attention
from sinkformers.core import backend
from sinkformers.core.ranges import SMALLEST_EXPONENT
from sinkformers.kernels import native
from sinkformers.kernels.native import arguments, binding
from sinkformers.kernels.native.arguments import Arguments, Layout

OPERATOR = Layout("int n\nint m\ndata scores\ndata weights")

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def results(function, inputs, *, backend, d_out=None):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs, backend=backend)
    d_out = torch.ones_like(out) if d_out is None else d_out.expand(out.shape)
    return [out, *torch.autograd.grad(out, inputs, d_out)]


def test_an_address_is_taken_in_one_place():
    """Elsewhere nothing would keep the tensor alive. Masks and cached tokens are only recognised by theirs."""
    places = []
    for path in Path(sinkformers.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(part, ast.Attribute) and part.attr in ("data_ptr", "storage", "untyped_storage")
                for part in ast.walk(node)
            ):
                places.append((path.name, node.name))
    recognised = [("mask_values.py", "remembered"), ("memory.py", "_ends_with")]
    assert sorted(places) == [("arguments.py", "_address"), *recognised]


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_structure_keeps_its_tensors(kind):
    args, tensor = Arguments(OPERATOR, n=2, m=3), torch.randn(2, 3)
    held = weakref.ref(tensor)
    getattr(args, kind)(scores=tensor)
    del tensor
    gc.collect()
    assert held() is not None
    del args
    gc.collect()
    assert held() is None


def test_a_structure_keeps_the_copies_it_makes():
    tokens = torch.randn(1, 1, 7, 5).mT
    args = Arguments(Layout("strided query"))
    args.read_tokens("query", tokens)
    copy, (address, *_) = tokens.contiguous(), struct.unpack("Pqqqq", args.packed())
    assert address != tokens.data_ptr()
    stored = (ctypes.c_float * copy.numel()).from_address(address)
    assert list(stored) == copy.flatten().tolist()


def test_an_output_out_of_order_is_not_written_to_a_copy():
    with pytest.raises(AssertionError, match="weights"):
        Arguments(OPERATOR, n=2, m=3).write(weights=torch.empty(3, 2).T)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2), (2, 1, 2, 2)])
def test_gradients_of_any_number_of_axes(lead):
    """The incoming gradient is expanded over the first axis, so that it has to be copied before it can be read."""
    inputs = [torch.randn(*lead, *shape, dtype=torch.float64) for shape in ((61, 24), (67, 24), (67, 33))]
    d_out = torch.randn(*lead[1:], 61, 33, dtype=torch.float64)
    for got, expected in zip(
        results(sinkhorn_attention, inputs, backend="native", d_out=d_out),
        results(sinkhorn_attention, inputs, backend="reference", d_out=d_out),
        strict=True,
    ):
        assert_close(got, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("size", [5, 37])
@pytest.mark.parametrize("n_iters", [1, 2, 5])
def test_jacobians_of_the_operator(size, n_iters):
    """Reverse mode under vmap repeats what forward saved along an axis of stride 0."""
    scores = torch.randn(2, size, 3, dtype=torch.float64)
    got, expected = (
        torch.func.jacrev(lambda c: sinkhorn(c, n_iters=n_iters, tau=0.7, backend=backend))(scores)  # noqa: B023
        for backend in ("native", "reference")
    )
    assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("lead", [(2,), (2, 3), (2, 2, 3)])
def test_jacobians_of_attention(lead):
    query, key, value = (torch.randn(*lead, *shape, dtype=torch.float64) for shape in ((7, 4), (5, 4), (5, 3)))
    got, expected = (
        torch.func.jacrev(lambda q: sinkhorn_attention(q, key, value, backend=backend).sum(0))(query)  # noqa: B023
        for backend in ("native", "reference")
    )
    assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("d", "e"), [(3, 12_304), (12_304, 3), (1_100, 1_024), (2_049, 12_289)])
@pytest.mark.parametrize("padded", [False, True])
def test_wide_rows(d, e, padded):
    """Rows that are copied to their place without padding, wider than any buffer of fixed size."""
    scale = 1 / d
    inputs = [torch.randn(1, 1, *shape, dtype=torch.float64) for shape in ((11, d), (13, d), (13, e))]
    mask = torch.arange(11) < 9 if padded else None

    def attend(*tokens, backend):
        return sinkhorn_attention(*tokens, scale=scale, query_mask=mask, backend=backend)

    for got, expected in zip(*(results(attend, inputs, backend=b) for b in ("native", "reference")), strict=True):
        assert_close(got, expected, atol=1e-10, rtol=0)


NEGATIVE = {"negative view": torch._neg_view, "part of a conjugate": lambda x: torch.complex(x, -x).conj().imag}


@pytest.mark.parametrize("view", NEGATIVE)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_negative_views(view, backend):
    """They store the opposite of what they show: as inputs, as the bias, as tau, and as the incoming gradient."""
    see = NEGATIVE[view]
    query, key, value, bias = (see(torch.randn(2, 19, 19, dtype=torch.float64)) for _ in range(4))
    tau = see(-torch.rand(2, dtype=torch.float64)) if view == "negative view" else see(torch.rand(2).double())
    assert all(x.is_neg() for x in (query, key, value, bias, tau))
    inputs = [query, key, value, bias, tau]

    def attend(*args, backend):
        return sinkhorn_attention(*args[:4], tau=args[4], n_iters=5, backend=backend)

    def normalise(scores, tau, *, backend):
        return sinkhorn(scores, tau=tau, n_iters=5, backend=backend)

    for function, given in ((attend, inputs), (normalise, [query, tau]), (normalise, [query[:, :3, :4], tau])):
        d_out = see(torch.randn(function(*given, backend="reference").shape, dtype=torch.float64))
        got = results(function, given, backend=backend, d_out=d_out)
        plain = [x.resolve_neg() for x in given]
        expected = results(function, plain, backend="reference", d_out=d_out.resolve_neg())
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, atol=1e-11, rtol=0)


class Library:
    """A compiled library that states an interface of its own."""

    def __init__(self, number, size=7 * 8):
        def stated(_):
            return b"int n\nstrided query\nreal scale"

        self.sinkformers_interface, self.sinkformers_structure = lambda: number, stated
        self.sinkformers_size, self.sinkformers_smallest_exponent = lambda _: size, Library


def test_arguments_are_packed_as_the_library_states():
    attention, _ = arguments.stated_layouts(Library(arguments.INTERFACE))  # pyright: ignore
    args, tensor = Arguments(attention, n=3, scale=0.5), torch.randn(2, 1, 4, 5)
    args.read_strided("query", tensor)
    assert struct.unpack("qPqqqqd", args.packed()) == (3, tensor.data_ptr(), 20, 0, 5, 1, 0.5)
    with pytest.raises(AttributeError, match="no argument 'm'"):
        Arguments(attention, m=5)
    for method in (args.read, args.write):
        with pytest.raises(AttributeError, match="no argument 'key'"):
            method(key=torch.ones(2, 3, 4, 5))
    for method in (args.read_strided, args.read_tokens):
        with pytest.raises(AttributeError, match="no argument 'key'"):
            method("key", torch.ones(2, 3, 4, 5))


def test_a_library_of_other_sources_is_not_called():
    for library in (Library(arguments.INTERFACE + 1), Library(arguments.INTERFACE, size=48), object()):
        reason = arguments.stated_layouts(library)  # pyright: ignore[reportArgumentType]
        assert isinstance(reason, str)
        assert "built from other sources" in reason
        assert "reinstall sinkformers" in reason


def test_missing_kernels_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(arguments, "INTERFACE", arguments.INTERFACE + 1)
    reason = binding._load()
    assert isinstance(reason, str)
    monkeypatch.setattr(binding, "_MISSING", reason)
    monkeypatch.setattr(backend, "_WARNED", set())
    scores, tokens = torch.randn(20, 20), torch.randn(7, 5)
    with pytest.warns(RuntimeWarning, match="compiled CPU kernels are not used, and torch computes instead") as warned:
        sinkhorn(scores)
    assert warned[0].filename == __file__
    backend._WARNED.clear()
    with pytest.warns(RuntimeWarning, match="compiled CPU kernels are not used") as warned:
        sinkhorn_attention(tokens, tokens, tokens)
    assert warned[0].filename == __file__
    sinkhorn(scores)  # a second warning would be an error
    sinkhorn_attention(tokens, tokens, tokens)
    assert sinkformers.backend_for(tokens, tokens, tokens) == "torch"
    with pytest.raises(NotImplementedError, match="built from other sources"):
        sinkhorn(scores, backend="native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_sides_take_exp_for_zero_at_the_same_place(dtype):
    assert native.smallest_exponent(dtype) == SMALLEST_EXPONENT[dtype]
