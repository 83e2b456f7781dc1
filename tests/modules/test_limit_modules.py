"""`n_iters=math.inf` in every module and model: near a thousand steps, with gradients, printed and copied."""

import copy
import math
import pickle

import numpy
import pytest
import torch

from sinkformers import MultiheadAttention, Sinkhorn, models, modules
from sinkformers.modules import ISAB, MAB, PMA, SAB

TEXT = {"dim": 8, "depth": 1, "heads": 2, "hidden": 11, "length": 9}
TOKENS = torch.tensor([[3, 5, 7, 1], [2, 4, 6, 8]])
MASK = torch.arange(7) < torch.tensor([[7], [4]])


def x(*shape):
    return torch.randn(shape)


# A module for some n_iters, and a call of it.
MODULES = {
    "Sinkhorn": (Sinkhorn, lambda module: module(x(2, 7, 5))),
    "MultiheadAttention": (
        lambda n_iters: MultiheadAttention(12, 3, batch_first=True, n_iters=n_iters),
        lambda module: module(t := x(2, 7, 12), t, t, key_padding_mask=~MASK, need_weights=False)[0],
    ),
    "MultiheadAttention with weights": (
        lambda n_iters: MultiheadAttention(12, 3, batch_first=True, n_iters=n_iters),
        lambda module: torch.cat(module(t := x(2, 7, 12), t, t, key_padding_mask=~MASK), -1),
    ),
    "SelfAttention": (
        lambda n_iters: modules.SelfAttention(12, 3, n_iters=n_iters),
        lambda module: module(x(2, 7, 12), MASK),
    ),
    "MAB": (lambda n_iters: MAB(3, 5, 8, 2, n_iters=n_iters), lambda module: module(x(2, 7, 3), x(2, 11, 5))),
    "SAB": (lambda n_iters: SAB(3, 8, 2, n_iters=n_iters), lambda module: module(x(2, 7, 3), MASK)),
    "ISAB": (lambda n_iters: ISAB(3, 8, 2, 4, n_iters=n_iters), lambda module: module(x(2, 7, 3), MASK)),
    "PMA": (lambda n_iters: PMA(8, 2, 3, n_iters=n_iters), lambda module: module(x(2, 7, 8), MASK)),
    "OffsetAttention": (
        lambda n_iters: modules.OffsetAttention(12, 3, n_iters=n_iters).eval(),
        lambda module: module(x(2, 7, 12)),
    ),
    "InvertibleAttention": (
        lambda n_iters: modules.InvertibleAttention(12, 3, n_iters=n_iters),
        lambda module: module(x(2, 7, 12), MASK),
    ),
    "ViT": (
        lambda n_iters: models.ViT(
            image=28, patch=7, channels=1, classes=3, dim=8, depth=1, heads=2, mlp_dim=11, n_iters=n_iters
        ),
        lambda module: module(x(2, 1, 28, 28)),
    ),
    "TextEncoder": (
        lambda n_iters: models.TextEncoder(vocabulary=50, classes=2, **TEXT, n_iters=n_iters).eval(),
        lambda module: module(TOKENS, TOKENS > 1),
    ),
    "SetTransformer": (
        lambda n_iters: models.SetTransformer(classes=3, dim=8, heads=2, inducing=4, n_iters=n_iters).eval(),
        lambda module: module(x(2, 17, 3)),
    ),
    "PointCloudTransformer": (
        lambda n_iters: models.PointCloudTransformer(
            classes=3, dim=8, sizes=(16, 8), neighbours=4, layers=1, fused=16, hidden=8, n_iters=n_iters
        ).eval(),
        lambda module: module(x(2, 40, 3)),
    ),
    "TranslationTransformer": (
        lambda n_iters: models.TranslationTransformer(
            source_vocabulary=50, target_vocabulary=40, **TEXT, n_iters=n_iters
        ).eval(),
        lambda module: module(TOKENS, TOKENS > 1, TOKENS[:, :3]),
    ),
}


def run(module, call):
    """Output and the gradients of all parameters, on the same inputs each time."""
    torch.manual_seed(3)
    out = call(module)
    parameters = list(module.parameters())
    return [out, *(torch.autograd.grad(out.square().sum(), parameters, allow_unused=True) if parameters else [])]


@pytest.mark.parametrize("name", MODULES)
def test_the_limit_is_that_of_many_steps(name):
    """Column sums are within 1e-3 of the limit's, so outputs and gradients are within 2% of their size."""
    build, call = MODULES[name]
    found = []
    for n_iters in (math.inf, 1001, 1):
        torch.manual_seed(0)
        found.append(run(build(n_iters), call))
    moved = False
    for limit, steps, softmax in zip(*found, strict=True):
        assert (limit is None) == (steps is None)
        if limit is None:
            continue
        assert limit.isfinite().all()
        assert (limit - steps).norm() <= 0.02 * max(steps.norm(), 0.1), name
        moved = moved or bool((limit - softmax).norm() > 3 * (limit - steps).norm())
    assert moved


@pytest.mark.parametrize("name", MODULES)
def test_it_is_printed_copied_and_pickled(name):
    module = MODULES[name][0](numpy.float64("inf"))
    assert "n_iters=inf" in repr(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(other) == repr(module)
        counts = [each.n_iters for each in other.modules() if hasattr(each, "n_iters")]
        assert all(type(count) in (int, float) for count in counts)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("wrong", [math.nan, -math.inf, 2.5, "inf", "3", None, True], ids=repr)
def test_other_numbers_and_texts_are_refused(name, wrong):
    with pytest.raises((TypeError, ValueError), match=r"n_iters must be a whole number ≥ 1 .* or math\.inf; got"):
        MODULES[name][0](wrong)
