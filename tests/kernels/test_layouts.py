"""Native attention reads tensors where they lie: any order of the axes, repeated axes, slices; one result."""

from itertools import permutations

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn_attention
from sinkformers.kernels import native
from tests import oracle

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

ORDERS = list(permutations(range(4)))


def laid_out(tensor, order):
    """The same values, with the axes lying in memory in another order, outermost first."""
    return tensor.permute(order).contiguous().permute([order.index(axis) for axis in range(len(order))])


def sliced(tensor):
    """Every second entry along every axis of something larger; between them NaN, or True in a mask."""
    filling = True if tensor.dtype == torch.bool else torch.nan
    larger = torch.full([2 * size for size in tensor.shape], filling, dtype=tensor.dtype)
    view = larger[tuple(slice(0, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def problem(d=5, e=3):
    """Tokens, what else a call takes, and the gradient of the output; sizes are distinct."""
    shapes = ((2, 3, 7, d), (2, 3, 11, d), (2, 3, 11, e), (2, 3, 7, 11), (2, 3), (2, 3, 7, e))
    *inputs, d_out = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    inputs[4] = inputs[4].sigmoid()
    return inputs, d_out


def run(inputs, d_out, change):
    """Output and all gradients, on inputs and a gradient that `change` has laid out."""
    moved = [change(x).requires_grad_() for x in inputs]
    query, key, value, bias, tau = moved
    out = sinkhorn_attention(query, key, value, bias, n_iters=5, tau=tau, backend="native")
    return [out, *torch.autograd.grad(out, moved, change(d_out))]


def exact(inputs, d_out):
    doubles = [x.detach().requires_grad_() for x in inputs]
    query, key, value, bias, tau = doubles
    out = oracle.attention(query, key, value, 5, tau, bias=bias)
    return [out, *torch.autograd.grad(out, doubles, d_out)]


def agree(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_axes_in_any_order(order, width):
    """At width 1 the stride of the features means nothing; at width 8 tokens lie as the kernels need them."""
    inputs, d_out = problem(width, width)

    def change(tensor):
        return laid_out(tensor, order) if tensor.dim() == 4 else laid_out(tensor, (1, 0))

    assert width == 1 or (change(d_out).stride(-1) == 1) == (order[-1] == 3)
    agree(run(inputs, d_out, change), exact(inputs, d_out))


@pytest.mark.parametrize("place", range(6))
def test_one_tensor_transposed_among_others(place):
    """Each tensor is asked for its own strides, not for those of its neighbour."""
    inputs, d_out = problem()
    tensors, seen = [*inputs, d_out], iter(range(6))

    def change(tensor):
        return laid_out(tensor, tuple(reversed(range(tensor.dim())))) if next(seen) == place else tensor.clone()

    assert not laid_out(tensors[place], tuple(reversed(range(tensors[place].dim())))).is_contiguous()
    agree(run(inputs, d_out, change), exact(inputs, d_out))


def test_slices():
    inputs, d_out = problem()
    agree(run(inputs, d_out, sliced), exact(inputs, d_out))


@pytest.mark.parametrize("axis", range(4))
def test_repeated_axes(axis):
    """An expanded axis has stride 0; the gradient of what was expanded is the sum over it."""
    inputs, d_out = problem()
    small = [x.narrow(axis, 0, 1).clone() if x.dim() > axis else x.clone() for x in inputs]
    wide = [x.expand(whole.shape) for x, whole in zip(small, inputs, strict=True)]
    repeated = d_out.narrow(axis, 0, 1).expand(d_out.shape)
    agree(run(wide, repeated, lambda x: x.detach()), exact(wide, repeated))


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 2, 1, 0), (1, 3, 0, 2)], ids=str)
def test_masks_in_any_order(order):
    inputs, d_out = problem()
    entries = torch.rand(2, 3, 7, 11) > 0.3
    queries, keys = torch.rand(2, 3, 7) > 0.3, torch.rand(2, 3, 11) > 0.3
    inside = entries & queries[..., None] & keys[..., None, :]
    moved = [laid_out(entries, order), laid_out(queries, (2, 0, 1)), laid_out(keys, (1, 2, 0))]
    results = []
    for masks in (None, moved, [sliced(mask) for mask in (entries, queries, keys)]):
        tokens = [x.clone().requires_grad_() for x in inputs[:3]]
        if masks is None:
            out = oracle.attention(*tokens, 5, mask=inside)
        else:
            named = dict(zip(("attn_mask", "query_mask", "key_mask"), masks, strict=True))
            out = sinkhorn_attention(*tokens, n_iters=5, backend="native", **named)
        results.append([out, *torch.autograd.grad(out, tokens, d_out)])
    agree(results[1], results[0])
    agree(results[2], results[0])


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2), (2, 1, 3, 2)], ids=str)
def test_any_number_of_leading_axes(lead):
    """Tokens and gradient transposed; with masks and bias that lack leading axes."""
    tokens = [torch.randn(*lead, d, n, dtype=torch.float64).mT for n, d in ((7, 5), (11, 5), (11, 3))]
    bias, keys = torch.randn(7, 11, dtype=torch.float64), torch.rand(11) > 0.3
    d_out = torch.randn(*lead, 3, 7, dtype=torch.float64).mT
    results = []
    for name in ("native", "oracle"):
        moved = [x.detach().requires_grad_() for x in (*tokens, bias)]
        if name == "native":
            out = sinkhorn_attention(*moved, n_iters=5, key_mask=keys, backend="native")
        else:
            out = oracle.attention(*moved[:3], 5, bias=moved[3], mask=keys)
        results.append([out, *torch.autograd.grad(out, moved, d_out)])
    agree(*results)
