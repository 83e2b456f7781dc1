"""`MultiheadAttention` at one iteration and torch's module: masks of every kind, dtypes, shapes that are refused."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import MultiheadAttention
from tests.rounding import rounding

TOLERANCE = rounding(1024, size=40)  # float64, outputs of up to some tens: 9e-12


def pair(n_iters=1, **options):
    """torch's module and ours with the same parameters, none of them zero."""
    theirs, ours = nn.MultiheadAttention(8, 2, **options), MultiheadAttention(8, 2, n_iters=n_iters, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    return theirs.double(), ours.double()


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def as_float(ignored):
    return torch.zeros(ignored.shape, dtype=torch.float64).masked_fill(ignored, -torch.inf)


def random_mask(*shape):
    """Return a boolean mask, True to ignore, with at least one valid entry per row."""
    ignored = torch.rand(shape) > 0.5
    ignored[..., 0] = False
    return ignored


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("heads", ["all heads", "per head"])
def test_a_boolean_matrix_with_float_padding(need_weights, heads):
    """torch's module deprecates the mixture, so it is given the matrix as floats."""
    theirs, ours = pair(batch_first=True)
    query, key = rand(3, 5, 8), rand(3, 7, 8)
    matrix = random_mask(5, 7) if heads == "all heads" else random_mask(6, 5, 7)
    padding = rand(3, 7).masked_fill(torch.arange(7) >= torch.tensor([[7], [5], [4]]), -torch.inf)
    options = {"key_padding_mask": padding, "need_weights": need_weights}
    expected, expected_weights = theirs(query, key, key, attn_mask=as_float(matrix), **options)
    out, weights = ours(query, key, key, attn_mask=matrix, **options)
    assert_close(out, expected, **TOLERANCE)
    if need_weights:
        assert_close(weights, expected_weights, **TOLERANCE)
    ours.n_iters = 3
    mixed, _ = ours(query, key, key, attn_mask=matrix, **options)
    assert_close(mixed, ours(query, key, key, attn_mask=as_float(matrix), **options)[0], **TOLERANCE)


@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 5, "vdim": 3}], ids=str
)
def test_the_weights_of_every_head_are_torchs(options):
    theirs, ours = pair(**options)
    query, key, value = rand(5, 3, 8), rand(7, 3, ours.kdim), rand(7, 3, ours.vdim)
    masks = {"attn_mask": random_mask(5, 7), "key_padding_mask": torch.arange(7).expand(3, -1) == 4}
    for average in (True, False):
        expected = theirs(query, key, value, average_attn_weights=average, **masks)
        for a, b in zip(ours(query, key, value, average_attn_weights=average, **masks), expected, strict=True):
            assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_self_attention_under_two_masks_is_torchs_at_valid_queries(training, need_weights):
    """torch's fused kernel serves its module in evaluation; rows with nothing left are NaN there, and zero here."""
    theirs, ours = (layer.train(training) for layer in pair(batch_first=True))
    x, matrix = rand(4, 5, 8), torch.rand(5, 5) > 0.5
    padding = torch.rand(4, 5) > 0.5
    options = {"attn_mask": matrix, "key_padding_mask": padding, "need_weights": need_weights}
    with torch.no_grad():
        expected, out = theirs(x, x, x, **options)[0], ours(x, x, x, **options)[0]
    nothing = (matrix | padding[:, None]).all(-1)
    compared = ~(nothing | padding)
    assert 0 < compared.sum() < compared.numel()
    assert_close(out[compared], expected[compared], **TOLERANCE)
    assert out[~compared].equal(ours.out_proj.bias.expand_as(out)[~compared])


@pytest.mark.parametrize("n_iters", [1, 3])
def test_a_matrix_per_sample_equals_one_call_per_sample(n_iters):
    layer = MultiheadAttention(8, 2, n_iters=n_iters).double()
    query, key, matrix = rand(5, 3, 8), rand(7, 3, 8), random_mask(3, 5, 7)
    for mask in (matrix, as_float(matrix)):
        out, _ = layer(query, key, key, attn_mask=mask.repeat_interleave(2, 0))
        for sample in range(3):
            one = slice(sample, sample + 1)
            alone, _ = layer(query[:, one], key[:, one], key[:, one], attn_mask=mask[sample])
            assert_close(out[:, one], alone, **TOLERANCE)


@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("need_weights", [True, False])
def test_inputs_without_a_batch_axis_equal_a_batch_of_one(n_iters, need_weights):
    layer, query, key = MultiheadAttention(8, 2, n_iters=n_iters).double(), rand(5, 8), rand(7, 8)
    padding, options = torch.arange(7) >= 4, {"attn_mask": random_mask(2, 5, 7), "need_weights": need_weights}
    out, weights = layer(query, key, key, padding, **options)
    expected, expected_weights = layer(query[:, None], key[:, None], key[:, None], padding[None], **options)
    assert_close(out, expected[:, 0], **TOLERANCE)
    assert not need_weights or weights.equal(expected_weights[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_dtypes(dtype, n_iters, batch_first, training):
    layer = MultiheadAttention(8, 2, batch_first=batch_first, n_iters=n_iters, dtype=dtype).train(training)
    x = torch.randn(4, 5, 8, dtype=dtype)
    for need_weights in (True, False):
        out, weights = layer(x, x, x, need_weights=need_weights)
        assert (out.shape, out.dtype) == (x.shape, dtype)
        assert weights is None or weights.dtype == dtype
        assert out.isfinite().all()


@pytest.mark.parametrize("n_iters", [1, 3])
def test_without_biases(n_iters):
    layer, x = MultiheadAttention(8, 2, bias=False, n_iters=n_iters), torch.randn(5, 3, 8)
    assert layer.in_proj_bias is None
    assert layer.out_proj.bias is None
    padding = torch.arange(5).expand(3, -1) >= 4
    assert layer(x, x, x, key_padding_mask=padding)[0][4].eq(0).all()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("training", [True, False])
def test_torchs_encoder_compiles_with_this_module(training):
    torch.compiler.reset()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2)
    for layer in encoder.layers:
        layer.self_attn = MultiheadAttention(8, 2, batch_first=True, n_iters=3)
    encoder.train(training)
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    expected = encoder(x, src_key_padding_mask=padding)
    assert_close(compiled(x, src_key_padding_mask=padding), expected, **rounding(8, torch.float32))


BATCHED, ONE = torch.randn(4, 5, 8), torch.randn(5, 8)
REFUSED = [
    ((BATCHED, ONE, BATCHED), {}, "must all have 3 axes, or 2 without a batch"),
    ((BATCHED, BATCHED, ONE), {}, "must all have 3 axes, or 2 without a batch"),
    ((ONE, BATCHED, ONE), {}, "must all have 3 axes, or 2 without a batch"),
    ((ONE, ONE, BATCHED), {}, "must all have 3 axes, or 2 without a batch"),
    ((BATCHED,) * 3, {"key_padding_mask": torch.zeros(5) > 0}, r"key_padding_mask must be .* \(4, 5\); got \(5,\)"),
    ((ONE,) * 3, {"key_padding_mask": torch.zeros(1, 5) > 0}, r"key_padding_mask must be .* \(5,\); got \(1, 5\)"),
    ((BATCHED,) * 3, {"attn_mask": torch.zeros(5) > 0}, r"attn_mask must be \(n, m\) or \(batch·heads, n, m\)"),
    ((ONE,) * 3, {"attn_mask": torch.zeros(5) > 0}, r"attn_mask must be \(n, m\) or \(batch·heads, n, m\)"),
    ((ONE,) * 3, {"attn_mask": torch.zeros(5, 5, 5) > 0}, "with batch·heads = 2"),
    ((BATCHED,) * 3, {"attn_mask": torch.zeros(4, 5) > 0}, r"attn_mask must broadcast to .*; got"),
]


@pytest.mark.parametrize(("tokens", "masks", "message"), REFUSED)
@pytest.mark.parametrize("training", [True, False])
def test_wrong_shapes_are_refused(tokens, masks, message, training):
    layer = MultiheadAttention(8, 2, batch_first=True, n_iters=1).train(training)
    with torch.set_grad_enabled(training), pytest.raises(ValueError, match=f"MultiheadAttention: .*{message}"):
        layer(*tokens, **masks)
