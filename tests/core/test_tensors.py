"""Which tensors are taken: on one device, dense, and of a dtype with arithmetic; the others are refused by name."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sinkformers import MultiheadAttention, Sinkhorn, marginal_error, sinkhorn, sinkhorn_attention, sinkhorn_limit
from sinkformers.flows import AttentionMap, Gaussian, Measure, Projections

SCORES = torch.zeros(2, 5, 7)
Q, K, V = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 7, 6)
ROW, COL = torch.full((5,), 0.2), torch.full((7,), 1 / 7)
MASK = torch.ones(2, 5, 7) > 0
ATTENTION = {
    "key": K,
    "value": V,
    "attn_mask": torch.ones(5, 7) > 0,
    "query_mask": torch.ones(2, 5) > 0,
    "key_mask": torch.ones(2, 7) > 0,
    "tau": torch.full((3,), 0.5),
}


def attention(**options):
    return sinkhorn_attention(**{"query": Q, "key": K, "value": V, **options})


@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_on_two_devices(name, n_iters):
    message = f"^sinkhorn_attention: {name} must be on the device of query, cpu; got meta. Move it: {name}.to\\(query"
    with pytest.raises(ValueError, match=message):
        attention(**{name: ATTENTION[name].to("meta"), "n_iters": n_iters})


def test_attention_on_two_devices_the_other_way_round():
    with pytest.raises(ValueError, match=r"^sinkhorn_attention: key must be on the device of query, meta; got cpu"):
        attention(query=Q.to("meta"))
    with pytest.raises(ValueError, match=r"^sinkhorn_attention: attn_mask must be on the device of query"):
        attention(attn_mask=torch.zeros(5, 7, device="meta"))


@pytest.mark.parametrize("function", [sinkhorn, sinkhorn_limit])
@pytest.mark.parametrize(
    ("name", "value"), [("mask", MASK), ("tau", torch.ones(2)), ("row_mass", ROW), ("col_mass", COL)]
)
def test_scores_on_two_devices(function, name, value):
    with pytest.raises(
        ValueError, match=f"^{function.__name__}: {name} must be on the device of scores, cpu; got meta"
    ):
        function(SCORES, **{name: value.to("meta")})
    with pytest.raises(
        ValueError, match=f"^{function.__name__}: {name} must be on the device of scores, meta; got cpu"
    ):
        function(SCORES.to("meta"), **{name: value})


def test_marginal_error_and_modules_on_two_devices():
    with pytest.raises(ValueError, match=r"^marginal_error: mask must be on the device of weights"):
        marginal_error(SCORES, MASK.to("meta"))
    with pytest.raises(ValueError, match=r"^sinkhorn: mask must be on the device of scores"):
        Sinkhorn()(SCORES, MASK.to("meta"))


def test_flows_on_two_devices():
    points, eye = torch.zeros(3, 2), torch.eye(2)
    with pytest.raises(ValueError, match=r"^Measure: weights must be on the device of points, cpu; got meta"):
        Measure(points, torch.full((3,), 1 / 3, device="meta"))
    with pytest.raises(ValueError, match=r"^Projections: value must be on the device of query, cpu; got meta"):
        Projections(eye, eye, eye.to("meta"))
    with pytest.raises(ValueError, match=r"^Gaussian: covariance must be on the device of mean"):
        Gaussian(torch.zeros(2), eye.to("meta"))
    field = AttentionMap(Projections.tied(eye))(Measure.uniform(points))
    with pytest.raises(ValueError, match=r"^Field: points must be on the device of measure.points"):
        field(points.to("meta"))
    with pytest.raises(ValueError, match=r"^Measure.uniform: points must hold values; got a tensor on meta"):
        Measure.uniform(points.to("meta"))


@pytest.mark.parametrize("function", [sinkhorn, sinkhorn_limit])
def test_a_tau_without_axes_may_stay_on_the_cpu(function):
    """As in torch's own operations: no other tensor of another device, and no other device without axes."""
    assert function(SCORES.to("meta"), tau=torch.tensor(0.5)).is_meta
    with pytest.raises(ValueError, match="tau must be on the device of scores, cpu; got meta"):
        function(SCORES, tau=torch.tensor(0.5, device="meta"))
    with FakeTensorMode():  # an accelerator, as far as shapes and devices go
        there = torch.empty(2, 5, 5, device="cuda:0")
        assert function(there, tau=torch.tensor(0.5)).device == there.device
        with pytest.raises(ValueError, match="tau must be on the device of scores, cuda:0; got cpu"):
            function(there, tau=torch.tensor([0.5, 0.5]))


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(4, 5)], layout=layout)


KINDS = {
    "sparse": (
        torch.eye(5).to_sparse,
        r"dense tensor; got one of layout torch.sparse_coo. Convert it: \w+.to",
    ),
    "compressed": (torch.eye(5).to_sparse_csr, r"dense tensor; got one of layout torch.sparse_csr. Convert it: \w+.to"),
    "nested": (lambda: nested(torch.strided), r"dense tensor; got a nested one. Pad it, .*, and mask the padding"),
    "jagged": (lambda: nested(torch.jagged), r"dense tensor; got a nested one. Pad it, .*, and mask the padding"),
    "float8": (lambda: torch.eye(5).to(torch.float8_e4m3fn), r"float16, .*; got torch.float8_e4m3fn. .*\w+.float\(\)"),
    "integers": (lambda: torch.eye(5).long(), r"float16, .*; got torch.int64. Convert it, as with \w+.float\(\)"),
    "booleans": (lambda: torch.eye(5) > 0, r"float16, .*; got torch.bool. Convert it, as with \w+.float\(\)"),
    "complex": (lambda: torch.eye(5) * 1j, r"float16, .*; got torch.complex64. Complex numbers are not supported\.$"),
}
FUNCTIONS = {
    "sinkhorn": sinkhorn,
    "sinkhorn_limit": sinkhorn_limit,
    "marginal_error": marginal_error,
    "sinkhorn_attention": lambda x: sinkhorn_attention(x, x, x),
    "SoftMax attention": lambda x: sinkhorn_attention(x, x, x, n_iters=1),
    "Sinkhorn": Sinkhorn(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensors(function, kind):
    make, message = KINDS[kind]
    with pytest.raises(TypeError, match=f"^[a-z_]+: (scores|weights|query) must be (a )?{message}"):
        FUNCTIONS[function](make())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", ["sparse", "compressed", "nested", "jagged"])
def test_kinds_of_tensors_in_modules(kind):
    make, message = KINDS[kind]
    with pytest.raises(TypeError, match=f"^MultiheadAttention: query must be a {message}"):
        MultiheadAttention(5, 1)(make(), make(), make())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda sparse: sinkhorn(torch.zeros(5, 5), mask=sparse.bool()), "mask"),
        (lambda sparse: sinkhorn_attention(Q, Q, Q, sparse), "attn_mask"),
        (lambda sparse: sinkhorn_attention(Q, Q, Q, query_mask=sparse.bool()), "query_mask"),
        (lambda sparse: sinkhorn(torch.zeros(5, 5, 2, 2), tau=sparse), "tau"),
    ],
)
def test_sparse_masks_and_taus(call, name):
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor; got one of layout torch.sparse_coo"):
        call(torch.eye(5).to_sparse())


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.complex64])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda dtype: sinkhorn(SCORES, tau=torch.ones(2).to(dtype)), "tau"),
        (lambda dtype: attention(attn_mask=torch.zeros(5, 7).to(dtype)), "attn_mask"),
        (lambda dtype: sinkhorn(SCORES, row_mass=ROW.to(dtype)), "row_mass"),
        (lambda dtype: Sinkhorn(tau=torch.ones(()).to(dtype)), "tau"),
    ],
)
def test_dtypes_beside_the_scores(call, name, dtype):
    with pytest.raises(TypeError, match=f"{name} must be float16, bfloat16, float32 or float64; got {dtype}"):
        call(dtype)


def test_masks_are_reported_in_the_shape_that_was_passed():
    with pytest.raises(ValueError, match=r"query_mask must broadcast to the tokens = \(2, 3, 5\); got shape \(2, 7\)"):
        attention(query_mask=torch.ones(2, 7) > 0)
    with pytest.raises(ValueError, match=r"key_mask must broadcast to the tokens = \(2, 3, 7\); got shape \(5,\)"):
        attention(key_mask=torch.ones(5) > 0)


@pytest.mark.parametrize("function", [sinkhorn, sinkhorn_limit])
def test_a_mask_larger_than_the_scores(function):
    with pytest.raises(ValueError, match=r"mask must broadcast to scores = \(1, 5, 7\); got shape \(2, 5, 7\)"):
        function(SCORES[:1], mask=MASK)


def masses_off_by(excess, dtype):
    """Quarters are exact, so that the excess, rounded once, is all that there is beyond 1."""
    return torch.tensor([0.25, 0.25, 0.25, 0.25, excess], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_masses_sum_to_one_to_rounding(dtype):
    """A sum and a quotient are off by eps/2 each, and adding five numbers in float32 by a few of its own eps."""
    eps = torch.finfo(dtype).eps
    for excess in (0.008, 1.02 * eps + 6e-7):
        with pytest.raises(ValueError, match=r"row_mass must sum to 1 along its last axis; its sums are 1.*, off by "):
            sinkhorn(SCORES, row_mass=masses_off_by(excess, dtype))
    sinkhorn(SCORES, row_mass=masses_off_by(0.98 * eps, dtype))
    for _ in range(100):
        mass = torch.rand(5).to(dtype)
        sinkhorn(SCORES, row_mass=mass / mass.sum())


def test_fake_scores_give_a_fake_limit():
    with FakeTensorMode():
        scores = torch.randn(2, 5, 7)
        for tau in (1.0, 0.5, torch.rand(2)):
            assert sinkhorn_limit(scores, tau=tau).shape == scores.shape
            weights, info = sinkhorn_limit(scores, tau=tau, return_info=True)
            assert (weights.shape, info.residual.shape) == (scores.shape, (2,))


@pytest.mark.parametrize("options", [{"n_iters": 1}, {"tau": 0.0}, {"n_iters": 1, "cost": "l2"}])
def test_a_second_derivative_of_softmax_attention(options):
    """torch's fused kernels have none; where torch takes its own operations instead, there is one."""
    query = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)

    def first(**more):
        out = sinkhorn_attention(query, query, query, **options, **more)
        return torch.autograd.grad(out.square().sum(), query, create_graph=True)[0]

    with pytest.raises(NotImplementedError, match=r'SoftMax attention .* again. .* with backend="reference" can'):
        first().sum().backward()
    (second,) = torch.autograd.grad(first(backend="reference").square().sum(), query)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (torchs,) = torch.autograd.grad(first().square().sum(), query)
    torch.testing.assert_close(torchs, second, atol=1e-11, rtol=1e-11)
    assert torch.autograd.grad(sinkhorn_attention(query, query, query, **options).sum(), query)[0].isfinite().all()


def test_the_default_device_is_not_asked():
    """A number `tau` and the seed of dropout are made on the CPU: on `meta` the results would be empty memory."""
    generator = torch.Generator().manual_seed(0)
    scores, q = torch.randn(5, 7, generator=generator), torch.randn(5, 3, generator=generator)
    calls = [
        lambda: sinkhorn(scores, tau=0.5),
        lambda: sinkhorn_limit(scores, tau=0.5),
        lambda: sinkhorn_attention(q, q, q, tau=0.5, dropout_p=0.5),
    ]
    for call in calls:
        torch.manual_seed(1)
        expected = call()
        torch.manual_seed(1)
        with torch.device("meta"):
            assert call().equal(expected)
