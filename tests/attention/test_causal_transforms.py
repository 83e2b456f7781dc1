"""Causal attention inside `torch.func`, `torch.compile`, autocast and the other things that torch does to functions."""

import pytest
import torch
from torch.testing import assert_close

from sinkformers import SinkhornCache, causal_sinkhorn
from sinkformers.attention.causal import BACKENDS as TABLE
from sinkformers.attention.causal import CausalAttentionCall
from tests.causal_cases import BACKENDS, MASKS, N, attend, tokens

# torch's own compiler still imports what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
OPERATORS = [name for name in BACKENDS if name != "reference"]
OPTIONS = {
    "triangle": {"is_causal": True, "n_iters": 5},
    "window, tau and padding": {
        "attn_mask": MASKS["window"],
        "tau": torch.tensor(0.6, dtype=torch.float64),
        "key_mask": torch.arange(N).expand(2, N) > 1,
    },
    "bias": {"attn_mask": torch.randn(N, N, dtype=torch.float64).masked_fill(~MASKS["triangle"], -torch.inf)},
    "prefix": {"causal": "prefix", "attn_mask": MASKS["triangle"], "n_iters": 5},
}
CALLS = [(name, case) for name in BACKENDS for case in OPTIONS if case != "prefix"] + [("auto", "prefix")]
CLOSE = {"atol": 1e-12, "rtol": 0}


def options_of(case, backend):
    return {**OPTIONS[case], "backend": backend}


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, 1, 0), (None, 0, None), (0, None, 1)], ids=str)
@pytest.mark.parametrize(("backend", "case"), CALLS)
def test_vmap(backend, case, in_dims):
    options, given = options_of(case, backend), [x.detach() for x in tokens(MASKS["triangle"], 2)]
    batches = [x if at is None else torch.stack([x, 2 * x, -x], at) for x, at in zip(given, in_dims, strict=True)]

    def function(*inputs):
        return attend(*inputs, **options)

    out = torch.vmap(function, in_dims)(*batches)
    for i in range(3):
        each = [x if at is None else x.select(at, i) for x, at in zip(batches, in_dims, strict=True)]
        assert_close(out[i], function(*each), **CLOSE)


@pytest.mark.parametrize(("backend", "case"), CALLS)
def test_func_grad(backend, case):
    options, given = options_of(case, backend), tokens(MASKS["triangle"], 2)

    def loss(*inputs):
        return attend(*inputs, **options).square().sum()

    expected = torch.autograd.grad(loss(*given), given)
    found = torch.func.grad(loss, (0, 1, 2))(*(x.detach() for x in given))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, **CLOSE)


@pytest.mark.parametrize(("backend", "case"), [call for call in CALLS if call[1] in ("triangle", "prefix")])
def test_jacrev_and_gradients_per_sample(backend, case):
    options, given = options_of(case, backend), [x.detach()[:, :4] for x in tokens(MASKS["triangle"], 3, d=3, e=2)]
    options = {**options, **({"attn_mask": MASKS["triangle"][:4, :4]} if case == "prefix" else {})}

    def one(query, key, value):
        return attend(query, key, value, **options).square().sum(-1)

    query, key, value = (x[0] for x in given)
    jacobian = torch.func.jacrev(one)(query, key, value)
    exact = torch.autograd.functional.jacobian(lambda query: one(query, key, value), query)
    assert_close(jacobian, exact, **CLOSE)
    found = torch.vmap(torch.func.grad(lambda *x: one(*x).sum(), (0, 1, 2)))(*given)
    for sample in range(3):
        inputs = [x[sample].clone().requires_grad_() for x in given]
        for a, b in zip(found, torch.autograd.grad(one(*inputs).sum(), inputs), strict=True):
            assert_close(a[sample], b, **CLOSE)


@pytest.mark.parametrize(("backend", "case"), [call for call in CALLS if call[0] != "reference"])
def test_compiled_is_eager(backend, case):
    torch._dynamo.reset()
    options, given = options_of(case, backend), tokens(MASKS["triangle"], 2)

    def function(*inputs):
        return attend(*inputs, **options)

    function(*given)  # skips here, where a backend does not serve
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (function, compiled):
        out = run(*given)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("backend", [OPERATORS[0], *(pytest.param(b, marks=pytest.mark.slow) for b in OPERATORS[1:])])
def test_compiled_generation(backend):
    """A step with a cache, compiled: the cache goes on as in eager mode."""
    torch._dynamo.reset()
    given = [x.detach() for x in tokens(MASKS["triangle"], 2)]
    whole = attend(*given, is_causal=True, backend=backend)

    def step(cache, *inputs):
        return attend(*inputs, is_causal=True, cache=cache[0], backend=backend)

    compiled, cache, out = torch.compile(step, backend="aot_eager", dynamic=True), SinkhornCache(), []
    for start, stop in ((0, 4), (4, 5), (5, N)):
        out.append(compiled(cache, *(x[:, start:stop] for x in given)))
    assert_close(torch.cat(out, 1), whole, **CLOSE)


@pytest.mark.parametrize("backend", OPERATORS)
def test_opcheck(backend):
    query, key, value = tokens(MASKS["triangle"], 2, dtype=torch.float32)
    attend(query, key, value, is_causal=True, backend=backend)
    bias, tau = torch.randn(1, N, N, requires_grad=True), torch.tensor([0.5, 0.9], requires_grad=True)
    for extras in ((None, None, None, None, None), (bias, None, None, torch.arange(N)[None] > 1, tau)):
        call = CausalAttentionCall(
            query, key, value, *extras, None, None, None, None, 5, 0.4, False, 0.0, True, True, 1
        )
        call = call.change(block=TABLE[backend].rows_per_block(call))
        torch.library.opcheck(torch.ops.sinkformers.attend_causal.default, (*call, backend, ""), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_meta_and_fake_tensors(backend):
    given = [x.detach().to("meta").requires_grad_() for x in tokens(MASKS["triangle"], 2, dtype=torch.bfloat16)]
    out = attend(*given, is_causal=True, backend=backend)
    assert out.is_meta
    assert out.shape == (2, N, 3)
    assert out.dtype == torch.bfloat16
    for x, grad in zip(given, torch.autograd.grad(out.sum(), given), strict=True):
        assert grad.shape == x.shape
    assert causal_sinkhorn(torch.randn(2, 3, 3, device="meta"), definition="prefix").shape == (2, 3, 3)


@pytest.mark.parametrize(("backend", "case"), [call for call in CALLS if call[1] in ("triangle", "prefix")])
def test_autocast(backend, case):
    """Tokens are rounded as by SDPA, and the steps run in float32."""
    options, given = options_of(case, backend), tokens(MASKS["triangle"], 2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*given, **options)
        assert causal_sinkhorn(torch.randn(3, 3).bfloat16()).dtype == torch.float32
        inside = torch.autograd.grad(out.float().square().sum(), given, retain_graph=True)
    assert out.dtype == torch.bfloat16
    assert_close(out, attend(*(x.bfloat16() for x in given), **options), atol=0, rtol=0)
    if case == "triangle" and backend != "reference":  # autograd's own products are rounded inside autocast
        for a, b in zip(inside, torch.autograd.grad(out.float().square().sum(), given), strict=True):
            assert a.equal(b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_and_batched_gradients(backend):
    given = tokens(MASKS["triangle"], 2)

    def function(*inputs):
        return attend(*inputs, is_causal=True, backend=backend)

    out = function(*given)
    again = torch.utils.checkpoint.checkpoint(function, *given, use_reentrant=False)
    d_outs = torch.randn(4, *out.shape, dtype=torch.float64)
    each = [torch.autograd.grad(out, given, d_out, retain_graph=True) for d_out in d_outs]
    for a, b in zip(torch.autograd.grad(again, given, d_outs[0]), each[0], strict=True):
        assert_close(a, b, **CLOSE)
    together = torch.autograd.grad(out, given, d_outs, is_grads_batched=True)
    for at, got in enumerate(together):
        assert_close(got, torch.stack([one[at] for one in each]), **CLOSE)


@pytest.mark.parametrize("backend", OPERATORS)
def test_a_second_derivative_says_what_to_do(backend):
    query, key, value = tokens(MASKS["triangle"], 2)
    out = attend(query, key, value, is_causal=True, backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'cannot be differentiated again.*backend="reference"'):
        grad.sum().backward()


def test_the_reference_has_a_second_derivative():
    query, key, value = (x[:, :4].detach().requires_grad_() for x in tokens(MASKS["triangle"], 1, d=2, e=2))
    assert torch.autograd.gradgradcheck(
        lambda *x: attend(*x, is_causal=True, backend="reference"), (query, key, value), fast_mode=True
    )
