"""The blocks of Set Transformers: a plain computation of each, order, padding, marginals, and SoftMax for one seed."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import sinkformers
from sinkformers.modules import ISAB, MAB, PMA, SAB
from tests.rounding import rounding

EXACT = rounding(4096)  # a few small layers in float64, with sums of up to some ten products: 9e-13


def plain_mab(mab, x, y, n_iters, scale, norm):
    """Compute a MAB head by head, with explicit matrices."""
    width = mab.out.in_features // mab.num_heads
    outs = []
    for head in range(mab.num_heads):
        part = slice(head * width, (head + 1) * width)
        query, key, value = mab.query(x)[..., part], mab.key(y)[..., part], mab.value(y)[..., part]
        weights = sinkformers.sinkhorn(query @ key.mT * scale, n_iters=n_iters, backend="reference")
        outs.append(query + weights @ value)
    h = torch.cat(outs, -1)
    h = mab.attention_norm(h) if norm else h
    h = h + F.relu(mab.out(h))
    return mab.out_norm(h) if norm else h


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale_by", ["head", "width"])
@pytest.mark.parametrize("n_iters", [1, 2, 5])
def test_a_mab_computes_what_its_docstring_says(n_iters, scale_by, norm):
    mab = MAB(3, 5, 14, 2, n_iters=n_iters, scale_by=scale_by, norm=norm).double()
    x, y = torch.randn(2, 11, 3).double(), torch.randn(2, 13, 5).double()
    scale = 1 / math.sqrt({"head": 7, "width": 14}[scale_by])
    assert_close(mab(x, y), plain_mab(mab, x, y, n_iters, scale, norm), **EXACT)
    assert sum("norm" in name for name, _ in mab.named_parameters()) == (4 if norm else 0)


def test_the_blocks_are_made_of_mabs():
    x = torch.randn(3, 11, 5).double()
    sab, isab, pma = SAB(5, 8, 2).double(), ISAB(5, 8, 2, 7).double(), PMA(5, 1, 3).double()
    assert torch.equal(sab(x), sab.mab(x, x))
    induced = isab.induce(isab.inducing.expand(3, -1, -1), x)
    assert_close(isab(x), isab.spread(x, induced), **EXACT)
    assert_close(pma(x), pma.mab(pma.seeds.expand(3, -1, -1), x), **EXACT)
    assert pma(x).shape == (3, 3, 5)


BLOCKS = {
    "SAB": lambda **options: SAB(5, 8, 2, **options),
    "ISAB": lambda **options: ISAB(5, 8, 2, 7, **options),
    "PMA": lambda **options: PMA(5, 1, 3, **options),
    "PMA with one seed": lambda **options: PMA(5, 1, 1, **options),
}


def block(name, **options):
    return BLOCKS[name](**options).double()


@pytest.mark.parametrize("n_iters", [1, 5])
@pytest.mark.parametrize("name", BLOCKS)
def test_order_does_not_matter(name, n_iters):
    made, x, order = block(name, n_iters=n_iters), torch.randn(2, 11, 5).double(), torch.randperm(11)
    out, shuffled = made(x), made(x[:, order])
    assert_close(shuffled, out if name.startswith("PMA") else out[:, order], **EXACT)


@pytest.mark.parametrize("n_iters", [1, 5])
@pytest.mark.parametrize("name", BLOCKS)
def test_padding_equals_deletion(name, n_iters):
    made, x = block(name, n_iters=n_iters), torch.randn(2, 11, 5).double()
    valid = torch.arange(11) < torch.tensor([[11], [6]])
    x[1, 6:] = torch.nan
    padded, alone = made(x, mask=valid)[1], made(x[1:, :6])[0]
    assert_close(padded if name.startswith("PMA") else padded[:6], alone, **EXACT)


@pytest.mark.parametrize("name", BLOCKS)
def test_softmax_and_sinkhorn_have_the_same_parameters(name):
    one, other = block(name, n_iters=1), block(name, n_iters=21)
    shapes = [[(key, p.shape) for key, p in made.named_parameters()] for made in (one, other)]
    assert shapes[0] == shapes[1]
    other.load_state_dict(one.state_dict())


def test_rectangular_marginals_as_they_are_watched():
    """16 points attend to 48 and back: rows sum to 1, columns to 16/48 and 48/16."""
    isab = ISAB(3, 8, 2, 16, n_iters=41)
    with sinkformers.watch_attention(isab) as watch:
        isab(torch.randn(2, 48, 3))
    assert list(watch) == ["induce", "spread"]
    for name, shape, share in (("induce", (2, 2, 48), 16 / 48), ("spread", (2, 2, 16), 48 / 16)):
        (seen,) = watch[name].calls
        assert seen.column_sums.shape == shape
        assert_close(
            seen.column_sums, torch.full(shape, share), atol=1e-4, rtol=0
        )  # 20 column steps, each halving the error at least: 1e-6, and float32
        assert seen.row_error.max() < 48 * torch.finfo(torch.float32).eps  # sums of up to 48 weights


@pytest.mark.parametrize("n_iters", [1, 3, 21])
def test_one_seed_stays_softmax(n_iters):
    pma, x = PMA(5, 1, 1, n_iters=n_iters, tau=0.5).double(), torch.randn(2, 11, 5).double()
    assert_close(pma(x), plain_mab(pma.mab, pma.seeds.expand(2, -1, -1), x, 1, 5**-0.5, True), **EXACT)


@pytest.mark.parametrize("n_iters", [3, 21])
def test_a_literal_single_seed_is_mean_pooling(n_iters):
    pma, x = PMA(5, 1, 1, n_iters=n_iters, literal=True, norm=False).double(), torch.randn(2, 11, 5).double()
    h = pma.mab.query(pma.seeds) + pma.mab.value(x).mean(1, keepdim=True)
    assert_close(pma(x), h + F.relu(pma.mab.out(h)), **EXACT)
    (grad,) = torch.autograd.grad(pma(x).square().sum(), [pma.mab.key.weight])
    assert grad.abs().max() < EXACT["atol"]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_converted_block_equals_one_built_with_the_same_settings(name):
    built = block(name, n_iters=5, scale_by="width")
    converted, x = block(name, n_iters=1, scale_by="width"), torch.randn(2, 11, 5).double()
    converted.load_state_dict(built.state_dict())
    before = copy.deepcopy(converted)(x)
    if name == "PMA with one seed":
        with pytest.raises(ValueError, match=r"pools with few queries: a doubly stochastic matrix of one row"):
            sinkformers.to_sinkformer(converted, 5)
        assert torch.equal(converted(x), built(x))
        return
    sinkformers.to_sinkformer(converted, 5)
    assert torch.equal(converted(x), built(x))
    sinkformers.set_n_iters(built, 1)
    sinkformers.to_transformer(converted)
    assert torch.equal(converted(x), before)
    assert torch.equal(built(x), before)
    assert all(type(part) is MAB for part in converted.modules() if isinstance(part, MAB))


@pytest.mark.filterwarnings("error")
def test_a_literal_seed_is_converted_without_a_warning():
    pma, x = PMA(5, 1, 1, literal=True).double(), torch.randn(2, 11, 5).double()
    out = pma(x)
    sinkformers.to_sinkformer(pma, 3)
    assert torch.equal(pma(x), out)


def test_a_learned_tau_reaches_every_block():
    isab = sinkformers.to_sinkformer(ISAB(5, 8, 2, 7), 3, tau="learned")
    isab(torch.randn(2, 11, 5)).square().sum().backward()
    assert [tuple(p.shape) for name, p in isab.named_parameters() if "tau" in name] == [(2,), (2,)]
    assert all(p.grad.abs().min() > 0 for name, p in isab.named_parameters() if "tau" in name)


def test_the_plan_is_applied_to_the_output_of_the_heads():
    mab, x = MAB(5, 5, 8, 2, n_iters=3, norm=False).double(), torch.randn(2, 11, 5).double()
    mab.plan = torch.zeros_like
    assert_close(mab(x, x), mab.query(x) + F.relu(mab.out(mab.query(x))), **EXACT)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MAB(3, 3, 8, 3), r"MAB: num_heads must divide dim; got num_heads=3, dim=8"),
        (lambda: MAB(3, 3, 8, 0), r"got num_heads=0"),
        (lambda: MAB(3, 3, 8, 2, scale_by="all"), r'MAB: scale_by must be "head" or "width"; got \'all\''),
        (lambda: MAB(3, 3, 8, 2, n_iters=0), r"MAB: n_iters must be a whole number ≥ 1"),
        (lambda: ISAB(3, 8, 2, 0), r"ISAB: num_inducing must be a whole number ≥ 1; got 0"),
        (lambda: PMA(8, 2, 0), r"PMA: num_seeds must be a whole number ≥ 1; got 0"),
    ],
)
def test_wrong_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.slow
def test_gradients_are_finite_at_a_hundred_thousand_points():
    isab = ISAB(3, 16, 2, 16, n_iters=21)
    x = (3 * torch.randn(1, 100_000, 3)).requires_grad_()
    out = isab(x)
    grads = torch.autograd.grad(out.square().mean(), [x, *isab.parameters()])
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)
    assert all(grad.abs().max() > 0 for grad in grads)
