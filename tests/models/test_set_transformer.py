"""The Set Transformer: a plain computation, its invariances, and equal parameters for SoftMax and Sinkhorn."""

import copy
import time

import pytest
import torch
from torch.testing import assert_close

import sinkformers
from sinkformers.models import SetTransformer
from sinkformers.models.set_transformer import unscaled_plan
from sinkformers.modules import ISAB, MAB
from tests import saved
from tests.rounding import rounding

SMALL = {"classes": 7, "dim": 12, "heads": 3, "inducing": 5}
EXACT = rounding(4096)  # a few small layers in float64, with sums of up to some ten products: 9e-13
AUTHORS = {"sab": False, "dropout": 0.5, "scale_by": "width", "plan": unscaled_plan, "literal_pool": True}


def model(**changes):
    return SetTransformer(**{**SMALL, **changes}).double().eval()


def points(batch=2, n=19):
    return torch.randn(batch, n, 3, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"seeds": 2}, {"norm": False}, {**AUTHORS, "norm": True}], ids="-".join)
@pytest.mark.parametrize("n_iters", [1, 5])
def test_the_network_computes_what_its_docstring_says(n_iters, options):
    made, x = model(n_iters=n_iters, **options), points()
    h = made.encoder[1](made.encoder[0](x))
    h = made.sab(h) if options.get("sab", True) else h
    assert_close(made(x), made.head(made.pool(h).flatten(1)), **EXACT)
    mabs = [part for part in made.modules() if isinstance(part, MAB)]
    assert len(mabs) == 5 + options.get("sab", True)
    pooled_by_softmax = options.get("seeds", 1) == 1 and not options.get("literal_pool", False)
    assert [mab.n_iters for mab in mabs] == [n_iters] * (len(mabs) - 1) + [1 if pooled_by_softmax else n_iters]


def test_the_authors_width_and_order_of_dropout():
    """Dropout is applied before and after the pooling: with probability 1, only biases are left."""
    made = SetTransformer(**{**SMALL, **AUTHORS, "dropout": 1.0, "norm": False}, n_iters=3).double()
    assert_close(made(points()), made.head.bias.expand(2, -1), atol=0, rtol=0)
    seen = []
    made.pool.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    made(points())
    assert seen[0].eq(0).all()
    assert made.sab is None
    assert all(part.scale == 12**-0.5 for part in made.modules() if isinstance(part, MAB))


def test_the_unscaled_plan_has_rows_that_sum_to_one_over_n():
    scores, value = torch.randn(2, 3, 5, 11).double(), torch.randn(2, 3, 11, 4).double()
    weights = sinkformers.sinkhorn(scores, n_iters=3, backend="reference") / 5
    assert_close(weights.sum((-2, -1)), torch.ones(2, 3).double(), **EXACT)
    seen = sinkformers.sinkhorn(scores, n_iters=3) @ value
    assert_close(unscaled_plan(seen), weights @ value, **EXACT)


@pytest.mark.parametrize("options", [{}, {"seeds": 2}, AUTHORS], ids="-".join)
@pytest.mark.parametrize("n_iters", [1, 5])
def test_order_does_not_matter(n_iters, options):
    made, x = model(n_iters=n_iters, **options), points()
    assert_close(made(x[:, torch.randperm(19)]), made(x), **EXACT)


@pytest.mark.parametrize("n_iters", [1, 5])
def test_padding_does_not_matter_and_gets_no_gradient(n_iters):
    made, x = model(n_iters=n_iters), points()
    x[1, 8:] = torch.nan
    valid = torch.arange(19) < torch.tensor([[19], [8]])
    padded = made(x.requires_grad_(), mask=valid)
    assert_close(padded[1:], made(x[1:, :8]), **EXACT)
    grads = torch.autograd.grad(padded.square().sum(), [x, *made.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][1, 8:].eq(0).all()


@pytest.mark.parametrize("options", [{}, AUTHORS], ids="-".join)
def test_softmax_and_sinkhorn_have_the_same_parameters(options):
    variants = [model(n_iters=n, **options) for n in (1, 21)]
    assert [(k, p.shape) for k, p in variants[0].named_parameters()] == [
        (k, p.shape) for k, p in variants[1].named_parameters()
    ]
    variants[1].load_state_dict(variants[0].state_dict())


@pytest.mark.parametrize("options", [{}, {"seeds": 2}, AUTHORS], ids="-".join)
def test_a_converted_set_transformer_equals_a_sinkformer(options):
    x = points()
    built, converted = model(n_iters=5, **options), model(n_iters=1, **options)
    converted.load_state_dict(built.state_dict())
    before = converted(x)
    assert not torch.allclose(before, built(x))
    sinkformers.to_sinkformer(converted, n_iters=5)
    assert torch.equal(converted(x), built(x))
    sinkformers.to_transformer(converted)
    assert torch.equal(converted(x), before)


def test_the_report_states_that_one_seed_stays_softmax():
    made = sinkformers.to_sinkformer(model(n_iters=1), n_iters=5)
    report = made.sinkformer_report
    names = ["encoder.0.induce", "encoder.0.spread", "encoder.1.induce", "encoder.1.spread", "sab.mab"]
    assert list(report.converted) == names
    assert list(report.kept) == ["pool.mab"]
    assert "one row is uniform, which is mean pooling" in report.kept["pool.mab"]
    assert "pool.mab [MAB] unchanged: pools with few queries" in str(report)
    with sinkformers.watch_attention(made) as watch:
        made(points())
    assert list(watch) == names


def test_the_model_can_be_copied_and_compiled():
    made, x = model(n_iters=3), points()
    assert torch.equal(copy.deepcopy(made)(x), made(x))
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), made(x), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("n_iters", [1, 21])
def test_isab_is_linear_in_the_number_of_points(n_iters):
    """Memory for the backward pass, and the time of both passes, grow linearly up to 100,000 points."""
    isab, sizes = ISAB(3, 16, 2, 16, n_iters=n_iters), (1_000, 10_000, 100_000)
    inputs = [torch.randn(1, n, 3) for n in sizes]

    def seconds(x):
        started = time.process_time()
        isab(x).sin().mean().backward()
        return time.process_time() - started

    kept = [saved.saved_bytes(lambda x=x: isab(x)) for x in inputs]
    spans = [min(seconds(x) for _ in range(5)) for x in inputs]
    assert exponent(sizes, kept) < 1.02
    assert exponent(sizes[1:], spans[1:]) < 1.25  # with fewer points, constant costs count


def exponent(sizes, costs):
    """Return the slope of log cost on log size, by least squares."""
    x, y = (torch.tensor(each, dtype=torch.float64).log() for each in (sizes, costs))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


@pytest.mark.slow
def test_isab_is_accurate_for_a_hundred_thousand_points():
    """If each point is repeated a hundred times, outputs stay the same and gradients are shared."""
    isab, x = ISAB(3, 16, 2, 16, n_iters=21).double(), torch.randn(1, 1_000, 3, dtype=torch.float64)
    few, many = x.clone().requires_grad_(), x.repeat(1, 100, 1).requires_grad_()
    outs = [isab(points) for points in (few, many)]
    assert_close(outs[1].unflatten(1, (100, -1)), outs[0][:, None].expand(-1, 100, -1, -1), **rounding(4096, size=10))
    for out in outs:
        out.sin().mean().backward()
    assert_close(many.grad.unflatten(1, (100, -1)).sum(1), few.grad, **EXACT)
    assert few.grad.abs().max() > 1e-5
