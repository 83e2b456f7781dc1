"""`InvertibleAttention`: the scaled branch is a contraction, and the inverse returns the input."""

import math

import pytest
import torch
from torch.testing import assert_close

from sinkformers.modules import InvertibleAttention
from sinkformers.modules.lipschitz import limit_bound, softmax_bound
from tests import oracle
from tests.rounding import rounding

COUNTS = [1, 2, 3, 5, math.inf]
VALID = torch.arange(7) < torch.tensor([[7], [4]])
EXACT = rounding(4096)  # a few small layers in float64, with sums of up to some ten products: 9e-13
# The inverse is within eps^¾·|y|, with |y| ≈ 2·√42 for 7 tokens of 6 features, and a margin of 4: 9e-11.
INVERTED = {"atol": 8 * torch.finfo(torch.float64).eps ** 0.75 * 42**0.5, "rtol": 0}


def build(n_iters, size=3.0, contraction=0.9):
    """Return a layer whose weights are so large that the branch is scaled down."""
    layer = InvertibleAttention(6, 3, 5, n_iters=n_iters, contraction=contraction).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight *= size
    return layer


def rand(*size):
    return torch.randn(*size, dtype=torch.float64)


def branch_jacobian(layer, x, mask=None):
    matrix = torch.autograd.functional.jacobian(lambda x: layer(x, mask) - x, x)
    return matrix.reshape(x.numel(), x.numel())


@pytest.mark.parametrize("n_iters", COUNTS)
@pytest.mark.parametrize(("n", "size"), [(1, 1.5), (7, 0.1), (7, 1.5), (61, 1.5)])
def test_the_branch_is_l2_attention_scaled_to_its_bound(n_iters, n, size):
    layer, x = build(n_iters, size), rand(1, n, 6)
    heads = layer.project(x).unflatten(-1, (3, 5)).transpose(1, 2)
    attended = oracle.attention(heads, heads, heads, 2001 if n_iters == math.inf else n_iters, cost="l2")
    branch = layer.out(attended.transpose(1, 2).flatten(2))
    bounds = {1: [softmax_bound], math.inf: [limit_bound]}.get(n_iters, [softmax_bound, limit_bound])
    bound = max(each(torch.tensor(float(n), dtype=torch.float64)).item() for each in bounds)
    for weight in layer.parameters():
        bound *= torch.linalg.svdvals(weight.detach())[0].item()
    assert (bound > 0.9) == (size > 1)
    assert_close(layer(x) - x, branch * min(1.0, 0.9 / bound), **EXACT)


@pytest.mark.parametrize("n_iters", COUNTS)
@pytest.mark.parametrize("lead", [(), (2,), (3, 2)])
def test_inverse(n_iters, lead):
    layer, x = build(n_iters), 2 * rand(*lead, 7, 6)
    y = layer(x)
    assert (y - x).abs().max() > 0.1
    assert_close(layer.inverse(y), x, **INVERTED)
    assert_close(layer(layer.inverse(x)), x, **INVERTED)


@pytest.mark.parametrize("n_iters", [1, 3, math.inf])
@pytest.mark.parametrize("size", [0.1, 10.0, 1e3])
@pytest.mark.parametrize("contraction", [0.9, 0.9999])
def test_inverse_in_single_precision(n_iters, size, contraction):
    layer, x = build(n_iters, contraction=contraction).float(), size * torch.randn(101, 7, 6)
    # eps^¾·|y| is 6e-6·|y|, and |y| is at most 1.9·|x|.
    assert_close(layer.inverse(layer(x)), x, atol=1e-5 * x[0].norm().item(), rtol=0)


@pytest.mark.parametrize("n_iters", [1, math.inf])
def test_the_branch_contracts(n_iters):
    """For large weights, small and large distances, and sharp attention."""
    for scale in (0.1, 1.0, 10.0):
        layer, x, change = build(n_iters, 10.0), scale * rand(101, 5, 6), rand(101, 5, 6)
        for length in (1e-3, 1.0):
            moved = x + scale * length * change
            stretch = (layer(moved) - moved - layer(x) + x).norm(dim=(1, 2)) / (moved - x).norm(dim=(1, 2))
            assert stretch.max() < 0.9


@pytest.mark.parametrize("n_iters", COUNTS)
def test_local_norm_is_that_of_the_jacobian(n_iters):
    layer, x = build(n_iters), rand(2, 7, 6)
    norms = layer.local_norm(x, VALID)
    for sample, mask, norm in zip(x, VALID, norms, strict=True):
        expected = torch.linalg.matrix_norm(branch_jacobian(layer, sample, mask), 2)
        assert_close(norm, expected, atol=0, rtol=2e-3)  # power iteration gives three digits
        assert norm < 0.9


@pytest.mark.parametrize("n_iters", [1, 3, math.inf])
def test_gradient(n_iters):
    layer, x = build(n_iters, 1.5), rand(2, 5, 6).requires_grad_()
    names, weights = zip(*layer.named_parameters(), strict=True)

    def call(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, VALID[:, :5]))

    assert torch.autograd.gradcheck(call, (x, *weights), fast_mode=True)


@pytest.mark.parametrize("n_iters", COUNTS)
def test_masking_equals_deletion(n_iters):
    layer, x = build(n_iters), rand(2, 7, 6)
    y = layer(x, VALID)
    assert y[1, 4:].equal(x[1, 4:])
    assert_close(y[1, :4], layer(x[1, :4]), **rounding(448))
    back = layer.inverse(y, VALID)
    assert back[1, 4:].equal(x[1, 4:])
    assert_close(layer.local_norm(x, VALID)[1], layer.local_norm(x[1, :4]), atol=0, rtol=2e-3)


@pytest.mark.parametrize("n_iters", COUNTS)
def test_the_contents_of_padding_change_nothing(n_iters):
    layer, results = build(n_iters), []
    x, d_y = rand(2, 7, 6), rand(2, 7, 6)
    valid = VALID[..., None]
    for filling in (0.0, torch.nan):
        tokens = x.masked_fill(~valid, filling).requires_grad_()
        y = layer(tokens, VALID)
        # Masked tokens are returned unchanged, so a loss may give them any gradient.
        d_x, *grads = torch.autograd.grad(y, (tokens, *layer.parameters()), d_y.masked_fill(~valid, filling))
        inverse, norm = layer.inverse(y, VALID).where(valid, 0), layer.local_norm(tokens, VALID)
        results.append([y.where(valid, 0), inverse, norm, d_x.where(valid, 0), *grads])
    for clean, poisoned in zip(*results, strict=True):
        assert clean.equal(poisoned)
        assert clean.isfinite().all()


@pytest.mark.parametrize("n_iters", COUNTS)
def test_the_order_of_tokens_does_not_matter(n_iters):
    layer, x, order = build(n_iters), rand(7, 6), torch.randperm(7)
    assert_close(layer(x[order]), layer(x)[order], **rounding(448))


def test_a_sample_without_tokens_and_layers_without_weights():
    layer, x = build(1), rand(2, 7, 6)
    empty = VALID & torch.tensor([[True], [False]])
    assert layer(x, empty)[1].equal(x[1])
    assert layer.inverse(x, empty)[1].equal(x[1])
    for weight in layer.parameters():
        torch.nn.init.zeros_(weight)
    x.requires_grad_()
    assert layer(x).equal(x)
    assert layer.inverse(x).equal(x)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(layer(x).sum(), (x, *layer.parameters())))


def test_nan_stays_in_its_sample():
    layer, x = build(math.inf), rand(2, 7, 6)
    x[0, 2, 3] = torch.nan
    assert_close(layer.inverse(layer(x))[1], x[1], **INVERTED)
    assert layer.inverse(x)[0].isnan().any()


@pytest.mark.parametrize("n_iters", [1, 3])
def test_an_iteration_that_does_not_contract_is_an_error(n_iters, monkeypatch):
    layer, x = build(n_iters), rand(7, 6)
    gain = layer._gain(x, None)
    monkeypatch.setattr(layer, "_gain", lambda *_: 30 * gain)
    remedy = (
        "n_iters=1 and n_iters=math.inf have a proven bound" if n_iters == 3 else "measures its Lipschitz constant.$"
    )
    message = rf"inverse .* after \d steps .* times the one before it, .* smaller contraction; local_norm.*{remedy}"
    with pytest.raises(RuntimeError, match=message):
        layer.inverse(layer(x))


def test_a_slow_iteration_is_an_error_too(monkeypatch):
    """Differences shrink by less than `contraction`: distant tokens attend to themselves only."""
    layer, x = InvertibleAttention(6, 1, contraction=0.5).double(), 100 * rand(7, 6)
    for weight in layer.parameters():
        torch.nn.init.eye_(weight)
    monkeypatch.setattr(layer, "_gain", lambda *_: torch.full((1, 1), 0.97, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"inverse .*: after 4\d steps .* is 0\.97 times the one before it"):
        layer.inverse(layer(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contraction": 1.0}, "contraction must lie between 0 and 1.*got 1.0.*Use 0.9"),
        ({"contraction": 0}, "contraction must lie between 0 and 1.*got 0"),
        ({"n_iters": 0}, "n_iters must be a whole number"),
        ({"n_iters": 2.5}, "n_iters must be a whole number"),
        ({"num_heads": 4}, "num_heads must divide dim"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=f"InvertibleAttention: {message}"):
        InvertibleAttention(**{"dim": 6, "num_heads": 3, **options})


def test_errors_of_a_call():
    layer = InvertibleAttention(6, 3)
    with pytest.raises(ValueError, match=r"InvertibleAttention: mask must broadcast to the tokens = \(2, 7\)"):
        layer(torch.randn(2, 7, 6), torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match="InvertibleAttention: mask must be a boolean tensor"):
        layer.inverse(torch.randn(2, 7, 6), torch.ones(2, 7))


def test_settings_are_shown_in_the_repr():
    assert "num_heads=3, n_iters=inf, contraction=0.9" in repr(build(math.inf))
