"""`MultiheadAttention`: `nn.MultiheadAttention` at one iteration, masks, settings per head."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import MultiheadAttention, sinkhorn
from tests.rounding import rounding

SINGLE = rounding(8, torch.float32)  # outputs below 1, each a sum of 8 products: 1e-6
MANY = rounding(80, torch.float32)  # gradients, and the sums of several such computations: 1e-5


OPTIONS = [
    {},
    {"batch_first": True},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
    {"kdim": 6, "vdim": 10},
    {"kdim": 6, "vdim": 10, "add_bias_kv": True, "add_zero_attn": True, "bias": False},
]


def pair(n_iters=1, **options):
    """torch's module and ours with the same parameters."""
    theirs, ours = nn.MultiheadAttention(8, 2, **options), MultiheadAttention(8, 2, n_iters=n_iters, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(options, batched):
    widths = (8, options.get("kdim", 8), options.get("vdim", 8))
    lengths = (5, 7, 7)
    if not batched:
        return [torch.randn(*size) for size in zip(lengths, widths, strict=True)]
    if options.get("batch_first"):
        return [torch.randn(3, *size) for size in zip(lengths, widths, strict=True)]
    return [torch.randn(n, 3, width) for n, width in zip(lengths, widths, strict=True)]


def masks(batched):
    padding = torch.arange(7) >= torch.tensor([[7], [5], [4]])
    padding = padding if batched else padding[1]
    ignored = torch.rand(5, 7) > 0.7
    ignored[:, 0] = False
    each_head = torch.rand(6 if batched else 2, 5, 7) > 0.7
    each_head[:, :, 0] = False
    as_float = torch.zeros(padding.shape).masked_fill(padding, -torch.inf)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "boolean": {"attn_mask": ignored},
        "per head": {"attn_mask": each_head},
        "both": {"attn_mask": ignored, "key_padding_mask": padding},
        "floats": {"attn_mask": torch.randn(5, 7), "key_padding_mask": as_float},
        "float padding": {"attn_mask": torch.randn(5, 7), "key_padding_mask": as_float + 0.3},
    }


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_one_iteration_equals_torchs_module(options, batched, need_weights):
    theirs, ours = pair(**options)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for mask in masks(batched).values():
        x = [t.requires_grad_() for t in inputs(options, batched)]
        expected, expected_weights = theirs(*x, need_weights=need_weights, **mask)
        out, weights = ours(*x, need_weights=need_weights, **mask)
        assert_close(out, expected, **SINGLE)
        if need_weights:
            assert_close(weights, expected_weights, **SINGLE)
        else:
            assert weights is None
        d_out = torch.randn_like(out)
        grads = [torch.autograd.grad(o, (*x, *m.parameters()), d_out) for o, m in ((out, ours), (expected, theirs))]
        for a, b in zip(*grads, strict=True):
            assert_close(a, b, atol=MANY["atol"], rtol=MANY["atol"])


def test_dropout_is_torchs_at_one_iteration():
    theirs, ours = pair(dropout=0.4)
    x = inputs({}, True)
    torch.manual_seed(3)
    expected, expected_weights = theirs(*x)
    torch.manual_seed(3)
    out, weights = ours(*x)
    assert_close(out, expected, **SINGLE)
    assert_close(weights, expected_weights, **SINGLE)
    assert_close(ours.eval()(*x)[0], theirs.eval()(*x)[0], **SINGLE)


@pytest.mark.parametrize("n_iters", [1, 3])
def test_dropout_is_for_training_only(n_iters):
    layer = MultiheadAttention(8, 2, dropout=0.4, n_iters=n_iters).eval()
    still = MultiheadAttention(8, 2, n_iters=n_iters)
    still.load_state_dict(layer.state_dict())
    x = inputs({}, True)
    assert layer(*x, need_weights=False)[0].equal(still(*x, need_weights=False)[0])
    assert not layer.train()(*x, need_weights=False)[0].equal(still(*x, need_weights=False)[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("n_iters", [3, 21])
def test_returning_weights_changes_no_output(options, n_iters):
    _, ours = pair(n_iters, **options)
    x = inputs(options, True)
    for mask in masks(True).values():
        with_weights, weights = ours(*x, average_attn_weights=False, **mask)
        without, _ = ours(*x, need_weights=False, **mask)
        assert_close(with_weights, without, **MANY)
        extra = bool(options.get("add_bias_kv")) + bool(options.get("add_zero_attn"))
        assert weights.shape == (3, 2, 5, 7 + extra)
        assert_close(weights.sum(-1), torch.ones(3, 2, 5), **MANY)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("n_iters", [1, 5])
@pytest.mark.parametrize("as_float", [False, True])
def test_padding_changes_nothing_in_self_attention(need_weights, n_iters, as_float):
    layer = MultiheadAttention(8, 2, batch_first=True, n_iters=n_iters)
    padding = torch.arange(9) >= torch.tensor([[9], [6], [4]])
    mask = torch.zeros(3, 9).masked_fill(padding, torch.finfo(torch.float32).min) if as_float else padding
    results = []
    for filling in (0.0, torch.nan):
        torch.manual_seed(1)
        x = torch.randn(3, 9, 8).masked_fill(padding[..., None], filling).requires_grad_()
        out, _ = layer(x, x, x, key_padding_mask=mask, need_weights=need_weights)
        d_out = torch.randn(3, 9, 8)
        results.append((out, *torch.autograd.grad(out, (x, *layer.parameters()), d_out)))
    for a, b in zip(*results, strict=True):
        assert a.equal(b)
        assert a.isfinite().all()
    assert results[0][1][padding].eq(0).all()
    alone, _ = layer(*[x[1:2, :6].detach()] * 3)
    assert_close(results[1][0][1:2, :6], alone, **SINGLE)


def test_a_query_padding_mask_in_cross_attention():
    layer = MultiheadAttention(8, 2, batch_first=True, n_iters=5)
    x, y = torch.randn(2, 6, 8), torch.randn(2, 9, 8)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    out, _ = layer(x, y, y, query_padding_mask=padding)
    alone, _ = layer(x[1:, :4], y[1:], y[1:])
    assert_close(out[1:, :4], alone, **SINGLE)
    unmasked, _ = layer(x, y, y)
    assert (unmasked[1, :4] - alone[0]).abs().max() > 1e-4


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_query_padding_mask_alone_masks_no_keys(need_weights):
    """Also if query and key are the same tensor."""
    layer = MultiheadAttention(8, 2, batch_first=True, n_iters=5)
    x, padding = torch.randn(2, 6, 8), torch.arange(6) >= torch.tensor([[6], [4]])
    out, _ = layer(x, x, x, query_padding_mask=padding, need_weights=need_weights)
    apart, _ = layer(x, x.clone(), x.clone(), query_padding_mask=padding, need_weights=need_weights)
    assert_close(out, apart, **SINGLE)
    alone, _ = layer(x[1:, :4], x[1:], x[1:])
    assert_close(out[1:, :4], alone, **SINGLE)
    # A padded query attends to nothing: what is left is the bias of the projection.
    assert out[1, 4:].equal(layer.out_proj.bias.expand(2, 8))


def test_a_learned_tau_is_in_the_state_dict():
    layer = MultiheadAttention(8, 2, tau=nn.Parameter(torch.tensor([0.5, 1.0])))
    assert set(layer.state_dict()) - set(nn.MultiheadAttention(8, 2).state_dict()) == {"tau"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_the_fused_kernel_of_the_encoder_layer_is_not_used(training, padded, grad):
    """Calls are counted without a hook, because torch does not use its fused kernel if there is one."""
    calls = []

    class Counted(MultiheadAttention):
        def forward(self, *args, **options):
            calls.append(1)
            return super().forward(*args, **options)

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    layer.self_attn = Counted(8, 2, batch_first=True, n_iters=5)
    layer.train(training)
    mask = torch.arange(4) >= torch.tensor([[4], [2]]) if padded else None
    with torch.set_grad_enabled(grad):
        layer(torch.randn(2, 4, 8), src_key_padding_mask=mask)
    assert calls == [1]


def test_copies_and_checkpoints():
    layer = MultiheadAttention(8, 2, n_iters=7, tau=0.5)
    again = copy.deepcopy(layer)
    assert (again.n_iters, again.tau) == (7, 0.5)
    x = torch.randn(5, 3, 8)
    assert again(x, x, x)[0].equal(layer(x, x, x)[0])
    layer._reset_parameters()
    assert not again.in_proj_weight.equal(layer.in_proj_weight)


def test_compiles():
    torch.compiler.reset()
    layer = MultiheadAttention(8, 2, n_iters=3, batch_first=True)
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    compiled = torch.compile(lambda x: layer(x, x, x, key_padding_mask=padding)[0], fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), layer(x, x, x, key_padding_mask=padding)[0], **SINGLE)


def test_every_head_can_have_its_own_tau():
    layer = MultiheadAttention(8, 2, batch_first=True, n_iters=5, tau=nn.Parameter(torch.tensor([0.0, 1.0])))
    x = torch.randn(2, 5, 8)
    _, weights = layer(x, x, x, average_attn_weights=False)
    q, k = (
        p.unflatten(-1, (2, 4)).transpose(1, 2) for p in nn.functional.linear(x, *in_projection(layer)).chunk(2, -1)
    )
    scores = q @ k.mT / 2
    assert_close(weights[:, 0], scores[:, 0].softmax(-1), **SINGLE)
    assert_close(weights[:, 1], sinkhorn(scores[:, 1], n_iters=5), **SINGLE)


def in_projection(layer):
    return layer.in_proj_weight[:16], layer.in_proj_bias[:16]


def test_inputs_are_not_changed():
    layer = MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    before = x.clone(), padding.clone()
    for need_weights, n_iters in itertools.product((True, False), (1, 3)):
        layer.n_iters = n_iters
        layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0].sum().backward()
    assert x.equal(before[0])
    assert padding.equal(before[1])


@pytest.mark.parametrize("need_weights", [True, False])
def test_half_precision_does_not_overflow_before_scores_are_scaled(need_weights):
    layer = MultiheadAttention(8, 2, n_iters=1, batch_first=True).half()
    layer.in_proj_weight.data *= 8
    x = 60 * torch.randn(2, 5, 8).half()
    out, weights = layer(x, x, x, need_weights=need_weights, attn_mask=torch.zeros(5, 5))
    assert out.dtype == torch.float16
    assert out.isfinite().all()
    assert weights is None or weights.isfinite().all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_key_masked_by_attn_mask_changes_nothing(need_weights):
    layer = MultiheadAttention(8, 2, batch_first=True, n_iters=3)
    x, y = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    ignored = torch.zeros(5, 7, dtype=torch.bool)
    ignored[:, 3] = True
    clean, _ = layer(x, y, y, attn_mask=ignored, need_weights=need_weights)
    y[:, 3] = torch.nan
    assert layer(x, y, y, attn_mask=ignored, need_weights=need_weights)[0].equal(clean)
