"""Backends as objects: a new one is a class and an entry of a table."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import sinkformers
from sinkformers import sinkhorn, sinkhorn_attention
from sinkformers.attention import attend
from sinkformers.attention.backends import Torch
from sinkformers.core import normalize
from sinkformers.core.backend import Backend, Backends


class Toy(Torch):
    """Attention by torch, for tokens with eight features, with its calls counted."""

    name = "toy"

    def __init__(self):
        self.calls = []

    def why_not(self, call):
        return None if call.query.shape[-1] == 8 else f"it takes 8 features, and got {call.query.shape[-1]}"

    def forward(self, call):
        self.calls.append("forward")
        return super().forward(call)

    def backward(self, call, result, d_output, needed):
        self.calls.append("backward")
        return super().backward(call, result, d_output, needed)


@pytest.fixture
def toy(monkeypatch):
    toy = Toy()
    table = {toy.name: toy, **attend.BACKENDS.by_name}
    monkeypatch.setattr(attend.BACKENDS, "by_name", table)
    return toy


def tokens(width, **options):
    return [torch.randn(2, n, width, **options) for n in (5, 7, 7)]


def test_a_new_backend_is_one_entry(toy):
    """Chosen by name and by `auto`, differentiated, transformed and compiled, with no other change."""
    inputs = tokens(8, dtype=torch.float64, requires_grad=True)
    expected = sinkhorn_attention(*inputs, backend="reference")
    d_out = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, inputs, d_out)
    for backend in ("toy", "auto"):
        toy.calls.clear()
        assert sinkformers.backend_for(*inputs, backend=backend) == "toy"
        out = sinkhorn_attention(*inputs, backend=backend)
        grads = torch.autograd.grad(out, inputs, d_out)
        assert toy.calls == ["forward", "backward"]
        for a, b in zip((out, *grads), (expected, *exact), strict=True):
            assert_close(a, b, atol=1e-12, rtol=0)
    batched = torch.vmap(lambda *x: sinkhorn_attention(*x, backend="toy"))(*inputs)
    assert_close(batched, expected, atol=1e-12, rtol=0)
    compiled = torch.compile(lambda *x: sinkhorn_attention(*x, backend="toy"), fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs), expected, atol=1e-12, rtol=0)


def test_a_backend_that_cannot_serve(toy):
    """By name it raises its reason; `auto` asks the next one."""
    inputs = tokens(3)
    with pytest.raises(
        NotImplementedError, match='backend="toy" cannot serve this call: it takes 8 features, and got 3'
    ):
        sinkhorn_attention(*inputs, backend="toy")
    assert sinkformers.backend_for(*inputs) in ("native", "torch")
    sinkhorn_attention(*inputs)
    assert toy.calls == []


def test_only_the_tables_name_backends():
    """A backend is reached through its table: no condition in the source compares names."""
    names = {"native", "torch", "triton", "reference"}
    assert {"auto", *names} == set(attend.BACKENDS.names()) == set(normalize.BACKENDS.names())
    for path in Path(sinkformers.__file__).parent.rglob("*.py"):
        compared = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)]
        sides = [side for node in compared for side in (node.left, *node.comparators)]
        assert not names & {side.value for side in sides if isinstance(side, ast.Constant)}, path


def test_no_backend_serves():
    class Never(Backend):
        name = "never"

        def why_not(self, call):
            return f"it takes nothing, not even {call}"

    with pytest.raises(NotImplementedError, match="no backend serves this call"):
        Backends(Never()).choose("caller", "auto", 3)


def test_asking_for_the_backend_draws_no_random_number():
    x = torch.randn(2, 3, 5, 8)
    state = torch.get_rng_state()
    sinkformers.backend_for(x, x, x, dropout_p=0.5)
    assert torch.get_rng_state().equal(state)


def test_softmax_attention_is_served_by_torch():
    x = torch.randn(2, 3, 5, 8)
    assert sinkformers.backend_for(x, x, x, n_iters=1) == sinkformers.backend_for(x, x, x, tau=0.0) == "sdpa"
    assert sinkformers.backend_for(x, x, x, n_iters=1, backend="torch") == "torch"
    assert nn.functional.scaled_dot_product_attention(x, x, x).equal(sinkhorn_attention(x, x, x, n_iters=1))


def test_scores_on_a_device_without_kernels_are_served_by_torch():
    assert sinkhorn(torch.randn(3, 20, 20, device="meta")).shape == (3, 20, 20)


def test_graphs_on_disk_belong_to_one_version():
    """Every compiled graph holds the formula of a gradient, so that none may serve other sources."""
    from sinkformers.attention.attend import BACKENDS as attention
    from sinkformers.core.limit_operator import BACKENDS as limit
    from sinkformers.core.normalize import BACKENDS as normalize

    found = {backend.revision() for table in (attention, limit, normalize) for backend in table.by_name.values()}
    assert len(found) == 1
    assert found.pop()
