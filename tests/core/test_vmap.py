"""`torch.vmap` over any axis of any argument is a loop over it, gradients included; so is one vmap inside another."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import sinkhorn, sinkhorn_attention, sinkhorn_limit

BACKENDS = ["native", "torch", "reference"]
B = 4  # no other axis has this size


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def masses(*shape):
    return torch.rand(shape, dtype=torch.float64).softmax(-1)


def mask(*shape):
    """Something is left in every row and column."""
    return (torch.rand(shape) > 0.3) | torch.eye(*shape[-2:], dtype=torch.bool)


# What one call takes, without the axis to map over.
OPERATOR = {
    "scores": lambda *b: normal(*b, 2, 5, 7),
    "mask": lambda *b: mask(*b, 5, 7),
    "row_mass": lambda *b: masses(*b, 5),
    "col_mass": lambda *b: masses(*b, 2, 7),
    "tau": lambda *b: torch.rand(*b, 2, dtype=torch.float64),
}
ATTENTION = {
    "query": lambda *b: normal(*b, 2, 5, 3),
    "key": lambda *b: normal(*b, 2, 7, 3),
    "value": lambda *b: normal(*b, 2, 7, 6),
    "attn_mask": lambda *b: normal(*b, 1, 5, 7),
    "query_mask": lambda *b: torch.arange(5).expand(*b, 2, 5) < torch.randint(2, 6, (*b, 2, 1)),
    "key_mask": lambda *b: torch.arange(7).expand(*b, 2, 7) < torch.randint(2, 8, (*b, 2, 1)),
    "tau": lambda *b: torch.rand(*b, 2, dtype=torch.float64),
}
ENTRIES = {**ATTENTION, "attn_mask": lambda *b: mask(*b, 2, 5, 7)}


def operator(backend, kept):
    def function(**named):
        return sinkhorn(named.pop("scores"), n_iters=5, backend=backend, **named)

    return function, {name: OPERATOR[name] for name in kept}


def limit(kept):
    def function(**named):
        return sinkhorn_limit(named.pop("scores"), max_iters=201, return_info=True, **named)[0]

    return function, {name: OPERATOR[name] for name in kept}


def attention(backend, makers=ATTENTION, **options):
    return lambda **named: sinkhorn_attention(n_iters=5, backend=backend, **options, **named), makers


UNWEIGHTED, WEIGHTED = ("scores", "mask", "tau"), tuple(OPERATOR)
FUNCTIONS = {
    **{f"{backend} operator": operator(backend, UNWEIGHTED) for backend in BACKENDS},
    **{f"{backend} operator with masses": operator(backend, WEIGHTED) for backend in BACKENDS},
    "limit": limit(UNWEIGHTED),
    "limit with masses": limit(WEIGHTED),
    **{f"{backend} attention": attention(backend) for backend in BACKENDS},
    **{f"{backend} attention, boolean": attention(backend, ENTRIES) for backend in BACKENDS},
    "native attention, l2": attention("native", cost="l2"),
    "native attention, implicit": attention("native", gradient="implicit"),
    "torch attention, implicit": attention("torch", gradient="implicit"),
}
CASES = [(case, name) for case, (_, makers) in FUNCTIONS.items() for name in [*makers, "all"]]


def positional(function, names):
    return lambda *args: function(**dict(zip(names, args, strict=True)))


def vjp(function, inputs):
    """Output, and the gradients of what has one, for a gradient that does not depend on the axis of the batch."""
    has_one = {name: x.is_floating_point() and "mass" not in name for name, x in inputs.items()}
    inputs = {name: x.detach().requires_grad_(has_one[name]) for name, x in inputs.items()}
    out = function(inputs)
    weights = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).sin().view(out.shape[1:])
    wanted = [x for x in inputs.values() if x.requires_grad]
    return [out, *torch.autograd.grad((out * weights).sum(), wanted)]


@pytest.mark.parametrize("end", [1, -1])
@pytest.mark.parametrize(("case", "name"), CASES)
def test_an_axis_of_one_argument(case, name, end):
    """The axis stands second, or last, in the argument that has one; `all` have it, each somewhere else."""
    function, makers = FUNCTIONS[case]
    inputs = {each: make(B) if name in (each, "all") else make() for each, make in makers.items()}
    # Axes are turned by place: neighbours differ, so that none can be taken for another's.
    dims = [None] * len(makers)
    for place, (each, x) in enumerate(inputs.items()):
        if name in (each, "all"):
            dims[place] = end if name != "all" else (place + (end == 1)) % x.dim()
            inputs[each] = x.movedim(0, dims[place])

    def mapped(inputs):
        return torch.vmap(positional(function, makers), in_dims=tuple(dims))(*inputs.values())

    def looped(inputs):
        parts = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(inputs.values(), dims, strict=True)]
        take = [[x if dim is None else x[i] for x, dim in zip(parts, dims, strict=True)] for i in range(B)]
        return torch.stack([positional(function, makers)(*each) for each in take])

    for got, expected in zip(vjp(mapped, inputs), vjp(looped, inputs), strict=True):
        # Both run the same steps in float64; the limit stops every matrix by itself, at 1e-6.
        assert_close(got, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("out_dim", [0, 2])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_one_vmap_inside_another(case, out_dim):
    """The outer one takes the last axis of the first argument and of the last, the inner one a middle axis."""
    function, makers = FUNCTIONS[case]
    first, *_, last = makers
    inputs = {name: make() for name, make in makers.items()}
    inputs[first] = makers[first](3, B).movedim((0, 1), (-1, 1))
    inputs[last] = makers[last](3).movedim(0, -1)
    inner = tuple(1 if name == first else None for name in makers)
    outer = tuple(-1 if name in (first, last) else None for name in makers)

    def mapped(inputs):
        once = torch.vmap(positional(function, makers), in_dims=inner, out_dims=out_dim)
        return torch.vmap(once, in_dims=outer)(*inputs.values())

    def looped(inputs):
        found = []
        for i in range(3):
            now = {name: x[..., i] if name in (first, last) else x for name, x in inputs.items()}
            each = [positional(function, makers)(*{**now, first: now[first][:, j]}.values()) for j in range(B)]
            found.append(torch.stack(each, out_dim))
        return torch.stack(found)

    for got, expected in zip(vjp(mapped, inputs), vjp(looped, inputs), strict=True):
        assert_close(got, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("case", [case for case in FUNCTIONS if "reference" not in case])
def test_gradients_of_each_entry(case):
    """vmap outside, the gradient inside: the gradient operator itself is mapped, over axes of its own."""
    function, makers = FUNCTIONS[case]
    names = list(makers)
    inputs = {name: make(B) for name, make in makers.items()}
    wanted = [place for place, name in enumerate(names) if inputs[name].is_floating_point() and "mass" not in name]
    dims = [place % inputs[name].dim() for place, name in enumerate(names)]

    def loss(*args):
        out = positional(function, makers)(*args)
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).sin().view(out.shape)).sum()

    moved = [x.movedim(0, dim) for x, dim in zip(inputs.values(), dims, strict=True)]
    got = torch.vmap(torch.func.grad(loss, argnums=tuple(wanted)), in_dims=tuple(dims))(*moved)
    for i in range(B):
        args = [x[i] for x in inputs.values()]
        leaves = [x.clone().requires_grad_() if place in wanted else x for place, x in enumerate(args)]
        expected = torch.autograd.grad(loss(*leaves), [leaves[place] for place in wanted])
        for a, b in zip(got, expected, strict=True):
            assert_close(a[i], b, atol=1e-11, rtol=0)
