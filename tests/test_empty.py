"""Sizes of zero: an empty sum is 0, whatever the path; nothing is NaN, and every gradient exists."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from sinkformers import MultiheadAttention, marginal_error, sinkhorn, sinkhorn_attention, sinkhorn_limit
from sinkformers.attention import attention_with_weights
from sinkformers.models import PointCloudTransformer, SetTransformer, TranslationTransformer
from sinkformers.modules import (
    ISAB,
    MAB,
    PMA,
    SAB,
    EquilibriumAttention,
    InvertibleAttention,
    OffsetAttention,
    SelfAttention,
)
from tests import oracle

BACKENDS = ["auto", "native", "torch", "reference"]
N_ITERS = [1, 2, 3]
FULL = {"b": 2, "h": 3, "n": 5, "m": 4, "d": 6, "e": 7}
# One size of zero, two, and all of them.
SIZES = [{**FULL, **dict.fromkeys(zeros, 0)} for count in (1, 2, 6) for zeros in itertools.combinations(FULL, count)]


def rand(*shape):
    return torch.randn(shape, requires_grad=True)


def masks(b, h, n, m):
    return {
        "none": {},
        "tokens": {"query_mask": torch.rand(b, n) > 0.3, "key_mask": torch.rand(b, m) > 0.3},
        "matrix": {"attn_mask": torch.rand(b, h, n, m) > 0.3},
        "bias": {"attn_mask": rand(b, h, n, m)},
    }


def gradients(out, inputs):
    """Those of a sum of the outputs; all inputs must have one, of their own shape and without NaN."""
    grads = torch.autograd.grad(sum(part.square().sum() for part in out), inputs)
    for x, grad in zip(inputs, grads, strict=True):
        assert grad.shape == x.shape
        assert grad.isfinite().all()
    return grads


@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(backend, n_iters, cost):
    for size, (way, dropout, learned) in itertools.product(
        SIZES, [("none", 0.0, False), ("tokens", 0.5, True), ("matrix", 0.0, False), ("bias", 0.5, False)]
    ):
        b, h, n, m, d, e = size.values()
        inputs, chosen = [rand(b, h, n, d), rand(b, h, m, d), rand(b, h, m, e)], masks(b, h, n, m)[way]
        options = {"n_iters": n_iters, "cost": cost, "backend": backend, **chosen}
        sources = [*inputs, chosen["attn_mask"]] if way == "bias" else list(inputs)
        if learned and not (backend == "reference" and n_iters == 1):  # where no step reads tau
            options["tau"] = torch.full((h,), 0.5, requires_grad=True)
            sources.append(options["tau"])
        out = sinkhorn_attention(*inputs, dropout_p=dropout, **options)
        assert out.shape == (b, h, n, e)
        grads = gradients([out], sources)
        if m == 0:
            assert out.eq(0).all()
        if m == 0 or out.numel() == 0:
            assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.parametrize("cost", ["dot", "l2"])
@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_features_all_scores_are_equal(backend, n_iters, cost):
    query, key, value = torch.randn(2, 3, 5, 0), torch.randn(2, 3, 4, 0), rand(2, 3, 4, 7)
    rows, cols = torch.rand(2, 5) > 0.3, torch.tensor([[True, False, True, True], [False, True, False, False]])
    out = sinkhorn_attention(
        query, key, value, query_mask=rows, key_mask=cols, n_iters=n_iters, cost=cost, backend=backend
    )
    both = (rows[:, None, :, None] & cols[:, None, None, :]).expand(2, 3, 5, 4)
    expected = oracle.attention(query, key, value, n_iters, mask=both, scale=1.0)
    assert_close(out.double(), expected, atol=8 * torch.finfo(torch.float32).eps, rtol=0)
    grads = [torch.autograd.grad(each.sum(), value)[0] for each in (out, expected)]
    assert_close(*grads, atol=8 * 5 * torch.finfo(torch.float32).eps, rtol=0)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "-".join(map(str, size.values())))
def test_one_iteration_is_torchs_function(size):
    b, h, n, m, d, e = size.values()
    inputs = [rand(b, h, n, d), rand(b, h, m, d), rand(b, h, m, e)]
    expected = F.scaled_dot_product_attention(*inputs)
    out = sinkhorn_attention(*inputs, n_iters=1)
    assert out.shape == expected.shape
    assert_close(out, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("n_iters", N_ITERS)
def test_attention_with_weights(n_iters):
    for size, way in itertools.product(SIZES, ("none", "tokens", "matrix", "bias")):
        b, h, n, m, d, e = size.values()
        inputs, chosen = [rand(b, h, n, d), rand(b, h, m, d), rand(b, h, m, e)], masks(b, h, n, m)[way]
        out, weights = attention_with_weights(*inputs, n_iters=n_iters, **chosen)
        assert (out.shape, weights.shape) == ((b, h, n, e), (b, h, n, m))
        assert m > 0 or out.eq(0).all()
        gradients([out, weights], [*inputs, chosen["attn_mask"]] if way == "bias" else inputs)


@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
def test_the_operator_its_limit_and_its_errors(shape):
    scores, mask = rand(*shape), torch.rand(shape) > 0.3
    for tau in (1.0, torch.full(shape[:1], 0.5, requires_grad=True)):
        sources = [scores, tau] if isinstance(tau, torch.Tensor) else [scores]
        options = {"tau": tau, "mask": mask}
        found = [sinkhorn(scores, n_iters=n, backend=b, **options) for n in N_ITERS for b in BACKENDS]
        weights, info = sinkhorn_limit(scores, return_info=True, **options)
        for each in (*found, weights, sinkhorn_limit(scores, **options)):
            assert each.shape == shape
            gradients([each], sources)
        assert info.converged.shape == shape[:1]
        assert info.converged.all()
    # Rows over no columns take no part, and the other way round.
    for error in marginal_error(scores.detach(), mask):
        assert error.eq(torch.zeros(shape[:1])).all()


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 5, "vdim": 3}], ids=str)
@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize(("b", "n", "m"), [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)])
def test_multihead(b, n, m, n_iters, options):
    layer = MultiheadAttention(8, 2, batch_first=True, n_iters=n_iters, **options)
    inputs = [rand(b, n, 8), rand(b, m, options.get("kdim", 8)), rand(b, m, options.get("vdim", 8))]
    for need_weights, chosen in itertools.product(
        (True, False), ({}, {"key_padding_mask": torch.rand(b, m) > 0.5}, {"attn_mask": torch.randn(n, m)})
    ):
        out, _ = layer(*inputs, need_weights=need_weights, **chosen)
        assert out.shape == (b, n, 8)
        gradients([out], [*inputs, *layer.parameters()])
        if m == 0 and not options.get("add_bias_kv"):
            assert out.equal(layer.out_proj.bias.expand(b, n, 8))


MODULES = {
    "SelfAttention": (lambda k: SelfAttention(6, 2, n_iters=k), lambda b, n: (b, n, 6)),
    "SAB": (lambda k: SAB(6, 8, 2, n_iters=k), lambda b, n: (b, n, 8)),
    "ISAB": (lambda k: ISAB(6, 8, 2, 3, n_iters=k), lambda b, n: (b, n, 8)),
    "PMA": (lambda k: PMA(6, 2, 3, n_iters=k), lambda b, _: (b, 3, 6)),
    "OffsetAttention": (lambda k: OffsetAttention(6, 2, n_iters=k).eval(), lambda b, n: (b, n, 6)),
    "InvertibleAttention": (lambda k: InvertibleAttention(6, 2, n_iters=k), lambda b, n: (b, n, 6)),
    "InvertibleAttention, limit": (lambda _: InvertibleAttention(6, 2, n_iters=math.inf), lambda b, n: (b, n, 6)),
    "EquilibriumAttention": (lambda _: EquilibriumAttention(6, 2), lambda b, n: (b, n, 6)),
    "SetTransformer": (
        lambda k: SetTransformer(classes=3, features=6, dim=8, heads=2, inducing=3, n_iters=k),
        lambda b, _: (b, 3),
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("n_iters", N_ITERS)
@pytest.mark.parametrize(("b", "n"), [(0, 5), (2, 0), (0, 0)])
def test_modules(name, b, n, n_iters):
    build, shape = MODULES[name]
    for mask in (None, torch.rand(b, n) > 0.3):
        layer, x = build(n_iters), rand(b, n, 6)
        out = layer(x) if mask is None or name == "OffsetAttention" else layer(x, mask)
        assert out.shape == shape(b, n)
        assert out.isfinite().all()
        gradients([out], [x, *layer.parameters()])


@pytest.mark.parametrize(("b", "n", "m"), [(0, 5, 4), (2, 0, 4), (2, 5, 0)])
def test_blocks_and_models_of_two_sequences(b, n, m):
    mab, x, y = MAB(6, 5, 8, 2), rand(b, n, 6), rand(b, m, 5)
    gradients([mab(x, y)], [x, y, *mab.parameters()])
    sizes = {"length": 9, "dim": 8, "depth": 1, "heads": 2, "hidden": 7}
    model = TranslationTransformer(source_vocabulary=11, target_vocabulary=13, **sizes)
    source, target = torch.randint(11, (b, m)), torch.randint(13, (b, n))
    out = model(source, torch.rand(b, m) > 0.3, target)
    assert out.shape == (b, n, 13)
    gradients([out], list(model.parameters()))


def test_a_batch_of_no_clouds():
    model = PointCloudTransformer(classes=4, dim=8, sizes=(8, 4), neighbours=3, fused=16, hidden=8).eval()
    assert model(torch.randn(0, 16, 3)).shape == (0, 4)


@pytest.mark.parametrize("build", [SelfAttention, InvertibleAttention, EquilibriumAttention])
def test_no_heads_and_heads_without_width_are_refused(build: type[nn.Module]):
    with pytest.raises(ValueError, match=rf"{build.__name__}: num_heads .* whole numbers ≥ 1; got num_heads=0"):
        build(6, 0)
    with pytest.raises(ValueError, match=r"got num_heads=2, head_dim=0"):
        build(7, 2, 0)
