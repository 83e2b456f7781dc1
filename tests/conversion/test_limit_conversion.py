"""Converted models at the limit, `n_iters=math.inf`: conversion, settings, schedules and watching."""

import copy
import math
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from sinkformers import (
    ConvergenceWarning,
    anneal_tau,
    models,
    set_n_iters,
    set_tau,
    sinkhorn_attention,
    to_sinkformer,
    to_transformer,
    watch_attention,
)
from sinkformers.attention.functional import attention_with_evidence
from sinkformers.conversion import attend
from tests.conversion.torch_encoders import VALID, agree, distance, encoder, run
from tests.limit_reference import BACKENDS

NEAR = 0.02  # outputs of order 1, and column sums within 1e-3 of those of the limit, in two layers


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("infinity", [math.inf, numpy.float32("inf"), "inf"], ids=repr)
def test_a_converted_model_is_near_many_steps(padded, infinity):
    """`"inf"` is how configurations save it."""
    model = encoder()
    softmax = run(model, padded)
    limit = run(to_sinkformer(model, infinity), padded)
    assert type(model.layers[0].self_attn.sinkhorn.n_iters) is float
    assert "n_iters=inf" in repr(model)
    set_n_iters(model, 1001)
    agree(limit, run(model, padded), atol=NEAR)
    assert distance(limit, softmax) > NEAR
    set_n_iters(model, math.inf)
    agree(run(model, padded), limit, atol=0.0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        agree(run(other, padded), limit, atol=0.0)
    agree(run(to_transformer(model), padded), softmax)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, 2.5, "3", "Infinity", None], ids=repr)
def test_other_numbers_and_texts_are_refused(wrong):
    model, message = encoder(), r"n_iters must be a whole number ≥ 1 .* or math\.inf; got"
    with pytest.raises((TypeError, ValueError), match=f"to_sinkformer: {message}"):
        to_sinkformer(model, wrong)
    to_sinkformer(model)
    with pytest.raises((TypeError, ValueError), match=f"set_n_iters: {message}"):
        set_n_iters(model, wrong)
    assert model.layers[0].self_attn.sinkhorn.n_iters == 3


def test_annealing_starts_from_softmax_and_ends_at_the_limit():
    model = encoder()
    softmax = run(model, True)
    limit = run(to_sinkformer(model, math.inf), True)
    anneal_tau(model, 0, 4)
    agree(run(model, True), softmax)
    distances = []
    for step in (1, 2, 3):
        anneal_tau(model, step, 4)
        distances.append(distance(run(model, True), softmax))
    assert distances == sorted(distances)
    anneal_tau(model, 4, 4)
    agree(run(model, True), limit, atol=0.0)


def test_a_learned_tau_gets_a_gradient():
    model = to_sinkformer(encoder(), math.inf, tau="learned")
    set_tau(model, 0.7)
    out, grads = run(model, True)
    named = dict(zip((name for name, _ in model.named_parameters()), grads, strict=True))
    learned = [grad for name, grad in named.items() if name.endswith("sinkhorn_tau")]
    assert len(learned) == 2
    assert all(grad.ne(0).all() for grad in learned)
    agree((out, []), (run(to_sinkformer(to_transformer(model), 1001, tau=0.7), True)[0], []), atol=NEAR)


def module(n_iters):
    torch.manual_seed(0)
    return to_sinkformer(nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64), n_iters)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", [1.0, 0.6])
def test_watching_shows_what_the_operator_found(tau, backend, monkeypatch):
    """Residual and products are those of the call itself, whichever backend serves it."""
    found = []

    def recorded(*args, **kwargs):
        found.append(attention_with_evidence(*args, **kwargs, backend=backend))
        return found[-1]

    monkeypatch.setattr(attend, "attention_with_evidence", recorded)
    layer, x = module(math.inf), torch.randn(3, 7, 8, dtype=torch.float64)
    set_tau(layer, tau)
    with watch_attention(layer) as watch:
        layer(x, x, x, key_padding_mask=~VALID, need_weights=False)
    (seen,), ((_, evidence),) = watch[""].calls, found
    assert seen.residual.shape == seen.products.shape == (3, 2)
    assert not seen.residual.requires_grad
    assert seen.residual.equal(evidence.residual)
    assert seen.products.equal(evidence.products)
    assert (seen.residual <= 1e-3).all()
    assert (seen.products >= 1).all()
    if tau == 1:
        assert_close(seen.column_error, seen.residual, atol=2e-3, rtol=0)
    text = f"residual {seen.residual.max():.1e} after {seen.products.max()} products"
    assert text in repr(seen)


@pytest.mark.parametrize("need_weights", [True, False])
def test_watching_changes_no_output(need_weights):
    layer, x = module(math.inf), torch.randn(3, 7, 8, dtype=torch.float64)
    plain = layer(x, x, x, need_weights=need_weights)
    with watch_attention(layer, keep_weights=True) as watch:
        out, weights = layer(x, x, x, need_weights=need_weights, average_attn_weights=False)
    assert out.equal(plain[0])
    (seen,) = watch[""].calls
    assert seen.residual.shape == (3, 2)
    if need_weights:
        assert_close((weights.sum(-2) - 1).abs().amax(-1), seen.residual, atol=1e-12, rtol=0)
        assert seen.weights.equal(weights)


def test_a_finite_count_has_no_residual():
    layer, x = module(5), torch.randn(3, 7, 8, dtype=torch.float64)
    with watch_attention(layer) as watch:
        layer(x, x, x, need_weights=False)
        finite = str(watch)
        set_n_iters(layer, math.inf)
        layer(x, x, x, need_weights=False)
    first, second = watch[""].calls
    assert (first.residual, first.products) == (None, None)
    assert "residual" not in finite + repr(first)
    header, row = str(watch).splitlines()
    assert header.split()[-2:] == ["residual", "products"]
    assert row.split()[-2:] == [f"{second.residual.max():.1e}", str(int(second.products.max()))]
    assert "<th>products</th>" in watch._repr_html_()


def test_a_watched_call_that_does_not_converge_gives_one_warning():
    layer, x = module(math.inf), torch.randn(3, 7, 8, dtype=torch.float64)
    hidden = torch.zeros(7, 7, dtype=torch.bool)
    hidden[[0, 3, 6]] = torch.arange(7) % 3 != 1  # three rows see two keys: no limit exists
    with pytest.warns(ConvergenceWarning, match="heads have not converged") as seen, watch_attention(layer) as watch:
        layer(x, x, x, attn_mask=hidden, need_weights=False)
    assert len(seen) == 1
    assert watch[""].calls[0].residual.max() > 1e-3


def test_scores_that_a_model_normalises_itself_are_watched():
    scores, settings = torch.randn(2, 3, 7, 7, dtype=torch.float64), module(math.inf).sinkhorn
    layer = module(math.inf)
    with watch_attention(layer) as watch:
        weights = attend.normalise(layer, settings, scores, None)
    (seen,) = watch[""].calls
    assert_close(seen.residual, (weights.sum(-2) - 1).abs().amax(-1), atol=1e-12, rtol=0)
    assert (seen.products >= 1).all()


def test_grouped_heads_are_watched():
    layer = module(math.inf)
    query, key, value = (torch.randn(2, count, 7, 4, dtype=torch.float64) for count in (4, 2, 2))
    with watch_attention(layer) as watch:
        out, _ = attend.attend(layer, layer.sinkhorn, query, key, value, enable_gqa=True)
    assert_close(out, sinkhorn_attention(query, key, value, enable_gqa=True, n_iters=math.inf), atol=1e-12, rtol=0)
    assert watch[""].calls[0].products.shape == (2, 4)


def test_our_own_models_are_converted_to_the_limit():
    sizes = {"image": 28, "patch": 7, "channels": 1, "classes": 3, "dim": 8, "depth": 2, "heads": 2, "mlp_dim": 11}
    model, images = models.ViT(**sizes, n_iters=1).eval(), torch.randn(2, 1, 28, 28)
    softmax = model(images)
    limit = to_sinkformer(model, math.inf)(images)
    built = models.ViT(**sizes, n_iters=math.inf).eval()
    built.load_state_dict(model.state_dict())
    assert limit.equal(built(images))
    with watch_attention(built) as watch:  # implied: it was built with the limit, not converted
        built(images)
    assert all(call.residual.shape == (2, 2) for layer in watch.values() for call in layer.calls)
    assert_close(to_transformer(model)(images), softmax)
