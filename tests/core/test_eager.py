"""Eager calls that nothing intercepts: few steps, a state in one tensor, and the same gradients however it is read."""

import sys

import pytest
import torch
from torch.profiler import profile
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sinkformers import sinkhorn, sinkhorn_attention
from sinkformers.attention import attend
from sinkformers.kernels import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def steps_of(function):
    """How many Python functions a call enters, and how many tensors it allocates."""
    for _ in range(2):
        function()  # what is computed once is computed now
    entered, allocated = [], []

    def watch(frame, event, what):
        if event == "call":
            entered.append(frame.f_code.co_name)
        elif event == "c_call" and "empty" in what.__name__:
            allocated.append(what.__name__)

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(entered), len(allocated)


def test_a_small_call_takes_few_steps():
    """A bound on time that no other process can spoil. Half of what the gradient enters belongs to torch."""
    tokens, scores = torch.randn(1, 2, 4, 4), torch.randn(4, 32, 32)
    entered, allocated = steps_of(lambda: sinkhorn_attention(tokens, tokens, tokens))
    assert entered <= 55
    assert allocated == 2  # the output and the state
    entered, allocated = steps_of(lambda: sinkhorn(scores))
    assert entered <= 55
    assert allocated == 2
    tokens.requires_grad_()
    out = sinkhorn_attention(tokens, tokens, tokens)
    entered, allocated = steps_of(lambda: out.backward(tokens, retain_graph=True))
    assert entered <= 85
    assert allocated == 4  # three gradients, and what the kernels write beside them


class Watch(TorchDispatchMode):
    """Checks that operators are given the tensors that their schemas name, with the axes that are described."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sinkformers":
            named = {part.name: value for part, value in zip(func._schema.arguments, args, strict=True)}
            required = [part.name for part in func._schema.arguments if str(part.type) == "Tensor"]
            assert all(named[name] is not None for name in required)
            assert named["rows"].shape[:-2] == named["safe"].shape == named["d_output"].shape[:-2]
        return func(*args, **(kwargs or {}))


def in_a_mode(out, inputs, d_out):
    with Watch():
        return torch.autograd.grad(out, inputs, d_out)


def profiled(out, inputs, d_out):
    with profile():
        return torch.autograd.grad(out, inputs, d_out)


def batched(out, inputs, d_out):
    grads = torch.autograd.grad(out, inputs, torch.stack([d_out, 2 * d_out]), is_grads_batched=True)
    assert_close([2 * each[0] for each in grads], [each[1] for each in grads])
    return [each[0] for each in grads]


def differentiable(out, inputs, d_out):
    grads = torch.autograd.grad(out, inputs, d_out, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.stack([each.sum() for each in grads]).sum().backward()
    return [each.detach() for each in grads]


def matrices(n, m, dtype):
    """Scores, of which those of the second matrix leave the range of the scalings."""
    scores = torch.randn(3, n, m, dtype=dtype)
    scores[1, :, 0] += 300
    return scores


def unsafe_tokens(dtype):
    """Queries and keys under which all heads of the second batch look at their first key."""
    query, key, value = torch.randn(3, 2, 3, 17, 8, dtype=dtype).unbind()
    query[1, ..., 0], key[1, :, 0, 0] = 30, 30
    return [query, key, value]


CALLS = {
    "attention": lambda dtype: (sinkhorn_attention, [torch.randn(2, 3, 7, 5, dtype=dtype) for _ in range(3)]),
    "one axis": lambda dtype: (sinkhorn_attention, [torch.randn(2, n, 5, dtype=dtype) for n in (7, 11, 11)]),
    "unsafe heads": lambda dtype: (sinkhorn_attention, unsafe_tokens(dtype)),
    "tau": lambda dtype: (
        lambda x, t: sinkhorn_attention(x, x, x, tau=t, n_iters=4),
        [torch.randn(2, 3, 7, 5, dtype=dtype), torch.rand(3)],
    ),
    "scores": lambda dtype: (lambda c: sinkhorn(c, n_iters=5), [matrices(19, 23, dtype)]),
    "one unsafe matrix": lambda dtype: (lambda c: sinkhorn(c, n_iters=5), [matrices(19, 23, dtype)[1]]),
    "one unsafe head": lambda dtype: (sinkhorn_attention, [x[1, 0] for x in unsafe_tokens(dtype)]),
    "tiny scores": lambda dtype: (lambda c: sinkhorn(c, n_iters=5), [matrices(7, 5, dtype)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [in_a_mode, profiled, batched, differentiable])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_that_are_intercepted_after_a_plain_call(name, way, dtype):
    """They are computed by the registered operator, from the state in the form that it describes."""
    function, inputs = CALLS[name](dtype)
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    d_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, d_out, retain_graph=True)
    got = way(out, inputs, d_out)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_unsafe_calls_are_unsafe():
    for name in ("unsafe heads", "scores", "tiny scores"):
        function, inputs = CALLS[name](torch.float32)
        node = function(*[x.detach().requires_grad_() for x in inputs]).grad_fn
        (safe,) = [tensor for tensor in node.saved_tensors if tensor is not None and tensor.dtype == torch.bool]
        assert safe[0].all()
        assert not safe[1].any()


@pytest.mark.parametrize("watched", [False, True])
def test_hooks_and_checkpoints_see_what_the_operator_describes(watched):
    """A profiler that starts after the forward pass must find the same tensors when it is run again."""
    tokens, shapes = torch.randn(2, 3, 7, 5, requires_grad=True), []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sinkhorn_attention(tokens, tokens, tokens)
    state = [tuple(part.shape) for part in attend._fake(_call_of(tokens), "native")]
    assert shapes == [tuple(tokens.shape)] * 3 + state
    expected = torch.autograd.grad(sinkhorn_attention(tokens, tokens, tokens).square().sum(), tokens)
    loss = checkpoint(sinkhorn_attention, tokens, tokens, tokens, use_reentrant=False).square().sum()
    if watched:
        with profile():
            got = torch.autograd.grad(loss, tokens)
    else:
        got = torch.autograd.grad(loss, tokens)
    assert torch.equal(got[0], expected[0])


def _call_of(tokens):
    from sinkformers.attention.functional import _plan

    settings = (None, 0.0, False, None, False, 3, 1.0, "dot", None, None, "unrolled", None, None, "auto", True)
    plan = _plan(tokens, tokens, tokens, *settings, None, None, None, None)
    return plan.arguments[0]
