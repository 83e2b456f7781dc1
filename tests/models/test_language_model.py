"""The language model: a plain computation, causality, and generation with and without a cache."""

import pytest
import torch
import torch.nn.functional as F

from sinkformers import SinkhornCache
from sinkformers.models import LanguageModel
from tests.rounding import rounding

SMALL = {"vocabulary": 19, "length": 31, "dim": 12, "depth": 2, "heads": 3, "hidden": 17}
EXACT = rounding(4096, size=2)  # two small layers in float64
POSITIONS = ["rotary", "learned"]


def language_model(**changes):
    torch.manual_seed(0)
    model = LanguageModel(**{**SMALL, **changes}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform: the first weights are small
            parameter.mul_(12.0 if parameter.dim() > 1 else 1.0)
    return model


def texts(batch=3, n=11):
    return torch.randint(19, (batch, n), generator=torch.Generator().manual_seed(1))


def turned(x):
    """Rotate features k and k + 2 of heads (…, n, 4) by n and n/100 radians."""
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * torch.tensor([1.0, 1e-2], dtype=torch.float64)
    turned = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("positions", POSITIONS)
def test_one_iteration_is_a_plain_transformer(positions):
    model, tokens = language_model(n_iters=1, positions=positions), texts()
    x = model.embed(tokens) + (0 if positions == "rotary" else model.positions[:11])
    for layer in model.layers:
        inner = layer.around_attention.norm(x)
        query, key, value = (
            each.unflatten(-1, (3, 4)).transpose(1, 2) for each in layer.attention.project(inner).chunk(3, -1)
        )
        if positions == "rotary":
            query, key = turned(query), turned(key)
        scores = (query @ key.mT / 2).masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
        x = x + layer.attention.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        inner = layer.around_feed_forward.norm(x)
        x = x + layer.feed_forward.narrow(F.relu(layer.feed_forward.widen(inner)))
    torch.testing.assert_close(model(tokens), model.last(x) @ model.embed.weight.T, **rounding(4096, size=100))
    assert model.state_dict().keys() == language_model(n_iters=3, positions=positions).state_dict().keys()


@pytest.mark.parametrize("causal", ["streaming", "prefix"])
def test_no_logit_depends_on_a_later_token(causal):
    model, tokens = language_model(causal=causal), texts(n=6)
    embedded = model.embed(tokens).detach().requires_grad_()
    model.embed.register_forward_hook(lambda *_: embedded)
    for place in range(6):
        gradient = torch.autograd.grad(model(tokens)[:, place].sum(), embedded)[0]
        assert gradient[:, place + 1 :].eq(0).all()
        assert gradient[:, : place + 1].abs().sum((0, 2)).gt(0).all()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("tau", [1.0, 0.5, "learned"])
@pytest.mark.parametrize("n_iters", [1, 3])
def test_parts_with_a_cache_equal_the_whole(positions, tau, n_iters):
    model, tokens, cache = language_model(positions=positions, tau=tau, n_iters=n_iters), texts(), SinkhornCache()
    parts = [model(part, cache) for part in tokens.split((4, 1, 6), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), **rounding(4096, size=100))


OPTIONS = [{}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("positions", POSITIONS)
def test_generation_with_a_cache_equals_generation_without(options, positions):
    model, prompt = language_model(positions=positions), texts(n=4)
    written = [
        model.generate(prompt, tokens=20, use_cache=use_cache, generator=torch.Generator().manual_seed(3), **options)
        for use_cache in (True, False)
    ]
    assert torch.equal(*written)
    assert torch.equal(written[0][:, :4], prompt)
    assert written[0].shape == (3, 24)


def test_greedy_generation_takes_the_likeliest_token():
    for causal in ("streaming", "prefix"):
        model = language_model(causal=causal)
        written = model.generate(texts(n=4), tokens=9)
        assert torch.equal(model(written)[:, 3:-1].argmax(-1), written[:, 4:])
        assert torch.equal(model.generate(texts(n=4), tokens=9, temperature=3.0, top_k=1), written)


def test_drawn_tokens_have_the_probabilities_of_the_logits():
    model, draws = language_model(), 20_000
    prompt = texts(batch=1, n=4)
    drawn = model.generate(prompt.expand(draws, 4), tokens=1, temperature=2.0, top_k=5)[:, -1]
    logits = model(prompt)[0, -1] / 2
    kept = logits.where(logits >= logits.topk(5).values[-1], -torch.inf)
    expected = kept.softmax(-1)
    found = torch.bincount(drawn, minlength=19) / draws
    bound = 5 * (expected * (1 - expected) / draws).sqrt()  # five standard errors
    assert ((found - expected).abs() <= bound).all()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match='positions must be "rotary" or "learned"; got \'sinusoidal\''):
        language_model(positions="sinusoidal")
    with pytest.raises(ValueError, match=r"causal attention needs an odd, finite n_iters"):
        language_model(n_iters=4)
    with pytest.raises(ValueError, match='causal must be "streaming" or "prefix"; got None'):
        language_model(causal=None)  # which would be attention to later tokens
    model = language_model()
    with pytest.raises(TypeError, match=r"tokens must be a tensor of whole numbers \(batch, n\); got list"):
        model.generate([[1, 2]], tokens=1)
    with pytest.raises(TypeError, match=r"whole numbers \(batch, n\); got torch.float32"):
        model(texts().float())
    with pytest.raises(TypeError, match=r"tokens must be a whole number; got 2.0"):
        model.generate(texts(), tokens=2.0)
    with pytest.raises(ValueError, match=r"≥ 0 and finite.*temperature=nan"):
        model.generate(texts(), tokens=2, temperature=float("nan"))
    with pytest.raises(ValueError, match=r"texts may have 31 tokens; got 32"):
        model.generate(texts(n=4), tokens=28)
    with pytest.raises(ValueError, match=r"shape \(batch, n\) with n ≥ 1; got \(3,\)"):
        model(texts()[:, 0])
    with pytest.raises(ValueError, match=r"top_k ≥ 1 or None; got tokens=2, temperature=1.0, top_k=0"):
        model.generate(texts(), tokens=2, temperature=1.0, top_k=0)


def test_a_temperature_next_to_zero_takes_the_likeliest_token():
    model, prompt = language_model(), texts()
    assert model.generate(prompt, tokens=5, temperature=1e-40).equal(model.generate(prompt, tokens=5))
