"""Calls run the kernels directly unless something intercepts them, which then sees the registered operators."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from sinkformers import sinkhorn, sinkhorn_attention


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


class Attend(torch.nn.Module):
    def forward(self, x):
        return sinkhorn_attention(x, x, x, n_iters=3)


def both(scores, tokens):
    weights = sinkhorn(scores, n_iters=5)
    out = sinkhorn_attention(tokens, tokens, tokens, n_iters=5)
    (weights.square().sum() + out.square().sum()).backward()
    found = [weights.detach(), out.detach(), scores.grad, tokens.grad]
    scores.grad = tokens.grad = None
    return found


@pytest.fixture
def inputs():
    return torch.randn(2, 7, 11, requires_grad=True), torch.randn(2, 3, 7, 5, requires_grad=True)


OPERATORS = {f"sinkformers::{name}{way}" for name in ("normalize", "attend") for way in ("", "_backward")}


def test_a_dispatch_mode_sees_the_operators_and_changes_nothing(inputs):
    straight = both(*inputs)
    with Watch() as watch:
        watched = both(*inputs)
    assert watch.seen >= OPERATORS
    assert all(torch.equal(one, other) for one, other in zip(straight, watched, strict=True))


def test_the_profiler_sees_the_operators(inputs):
    with profile() as recorded:
        both(*inputs)
    assert {event.key for event in recorded.key_averages()} >= OPERATORS


def test_tensors_without_data_are_not_handed_to_kernels(inputs):
    fake = FakeTensorMode().from_tensor(inputs[0].detach())
    assert sinkhorn(fake, n_iters=3).shape == fake.shape
    assert sinkhorn(fake.to("meta"), n_iters=3).is_meta


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing_records_the_operators(inputs):
    scores, tokens = (x.detach() for x in inputs)
    traced = torch.jit.trace(lambda x: sinkhorn(x, n_iters=3), torch.randn_like(scores), check_trace=False)
    assert torch.equal(traced(scores), sinkhorn(scores, n_iters=3))
    attend = partial(sinkhorn_attention, n_iters=3)
    traced = torch.jit.trace(lambda x: attend(x, x, x), torch.randn_like(tokens), check_trace=False)
    assert torch.equal(traced(tokens), attend(tokens, tokens, tokens))
    exported = torch.export.export(Attend(), (torch.randn_like(tokens),)).module()
    assert torch.equal(exported(tokens), attend(tokens, tokens, tokens))


def test_nothing_is_saved_without_grad(inputs):
    with torch.no_grad():
        assert sinkhorn(inputs[0], n_iters=3).grad_fn is None
    assert sinkhorn(inputs[0].detach(), n_iters=3).grad_fn is None
    assert sinkhorn(inputs[0], n_iters=3).grad_fn is not None


def test_importing_once_more():
    """Notebooks and reloaders drop the modules of a package and import it again."""
    code = """
import sys, torch
for _ in range(2):
    for name in [name for name in sys.modules if name.startswith("sinkformers")]:
        del sys.modules[name]
    from sinkformers import sinkhorn_attention
    q = torch.ones(2, 5, 4, requires_grad=True)
    assert sinkhorn_attention(q, q, q).allclose(torch.ones(2, 5, 4))
    torch.vmap(sinkhorn_attention)(q, q, q).sum().backward()
    assert q.grad.allclose(torch.ones(2, 5, 4))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
