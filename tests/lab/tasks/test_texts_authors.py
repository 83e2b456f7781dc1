"""The differences between the authors' code and the paper, each as described, and only in the preset `authors`."""

from dataclasses import replace

import pytest
import torch

import sinkformers
from sinkformers.lab.artefacts import figure4
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.data import load_opinions
from sinkformers.lab.tasks.texts import TextTask
from sinkformers.lab.tasks.texts_authors import (
    AuthorsTask,
    DetachedAttention,
    detached_sinkhorn,
    merged,
    softmax_twice,
)
from sinkformers.modules import SelfAttention


def potentials(scores, n_iters):
    """The definition with the column potential detached, as the authors wrote it."""
    f, g = torch.zeros(scores.shape[:-1]), torch.zeros(scores.mT.shape[:-1])
    for step in range(n_iters):
        if step % 2 == 0:
            f = -(scores + g[..., None, :]).logsumexp(-1)
        else:
            g = -(scores + f[..., :, None]).logsumexp(-2).detach()
    return (scores + f[..., :, None] + g[..., None, :]).exp()


@pytest.mark.parametrize("n_iters", [1, 3, 5])
def test_the_detached_potential_changes_the_gradient_and_not_the_weights(n_iters):
    scores = torch.randn(2, 7, 7, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(2, 7, 7, dtype=torch.float64)
    found, expected = detached_sinkhorn(scores, None, n_iters), potentials(scores, n_iters)
    torch.testing.assert_close(found, expected)
    ours, theirs, exact = (
        torch.autograd.grad((weights * probe).sum(), scores)[0]
        for weights in (found, expected, sinkformers.sinkhorn(scores, n_iters=n_iters))
    )
    torch.testing.assert_close(ours, theirs)
    assert torch.allclose(ours, exact) == (n_iters == 1)


@pytest.mark.parametrize("n_iters", [1, 3])
def test_padding_is_a_query_but_no_key(n_iters):
    layer, x = SelfAttention(6, 2, n_iters=n_iters).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    layer.__class__ = DetachedAttention
    found = layer(x, torch.arange(9) < torch.tensor([[9], [4]]))
    for row, n in enumerate((9, 4)):
        query, key, value = layer.project(x[row]).unflatten(-1, (3, 2, 3)).permute(1, 2, 0, 3)
        weights = potentials(query @ key[:, :n].mT / 3**0.5, n_iters)  # (2, 9, n)
        expected = layer.out((weights @ value[:, :n]).transpose(0, 1).flatten(1))
        torch.testing.assert_close(found[row], expected, atol=1e-12, rtol=1e-12)
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_softmax_is_applied_twice():
    logits, labels = torch.tensor([[0.0, 3.0]]), torch.tensor([1])
    p = torch.tensor([0.0, 3.0]).softmax(0)
    assert softmax_twice(logits, labels).item() == pytest.approx(-p.softmax(0)[1].log().item(), rel=1e-6)


def test_both_parts_are_merged_and_split_again():
    before = load_opinions()
    after = merged(before)
    assert (len(after.train.texts), len(after.test.texts)) == (1638, 410)

    def together(texts):
        written = [*texts.train.texts, *texts.test.texts]
        return dict(zip(written, torch.cat([texts.train.labels, texts.test.labels]).tolist(), strict=True))

    assert together(after) == together(before)
    assert set(after.test.texts) != set(before.test.texts)
    assert after.name == "opinions, merged and split again"


@pytest.fixture
def made():
    smoke = figure4.FIGURE4.presets["smoke"]
    preset = replace(smoke, config=replace(smoke.config, authors=True))
    return figure4.task(preset, preset.arms[1], 0, None)


def test_positions_are_noise_that_is_saved_and_not_trained(made):
    assert isinstance(made, AuthorsTask)
    first, second = made.model(), made.model()
    assert not torch.equal(first.positions, second.positions)
    assert first.positions.std().item() == pytest.approx(1, abs=0.1)
    assert "positions" not in dict(first.named_parameters())
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.positions, second.positions)


def test_all_texts_are_padded_to_the_same_length_and_the_maximum_includes_padding(made):
    model = made.model().eval()
    tokens = made.train.padded(torch.tensor([0]))[0]
    n = tokens.shape[1]
    answer = model(tokens)
    longer = torch.nn.functional.pad(tokens, (0, 5))
    torch.testing.assert_close(model(longer, torch.arange(n + 5)[None] < n), answer)
    model.positions[0] += 3.0
    assert not torch.allclose(model(tokens), answer)
    with pytest.raises(ValueError, match=r"texts may have 32 tokens; got 33"):
        model(torch.zeros(1, 33, dtype=torch.long))


def test_batches_are_drawn_whatever_the_lengths(made):
    lengths = [made.train.lengths[batch].sort().values for batch in made.batches(1)]
    assert all(each[0] < each[-1] for each in lengths)
    assert torch.cat(made.batches(1)).sort().values.equal(torch.arange(len(made.train)))


def test_embedded_tokens_are_not_dropped(made):
    model = made.model().train()
    model.encoder = torch.nn.Identity()
    model.encoder.forward = lambda x, _mask: x
    tokens = made.train.padded(torch.arange(3))
    assert torch.equal(model(*tokens), model(*tokens))
    assert {layer.eps for layer in made.model().modules() if isinstance(layer, torch.nn.LayerNorm)} == {1e-6}


def test_the_rate_falls_before_the_twelfth_epoch():
    recipes = [figure4.FIGURE4.presets[name].config.recipe for name in ("authors", "paper")]
    assert [recipe.rate_at(12) for recipe in recipes] == pytest.approx([1e-5, 1e-4])
    assert [recipe.rate_at(11) for recipe in recipes] == pytest.approx([1e-4, 1e-4])


def test_an_even_number_of_iterations_is_refused(made):
    with pytest.raises(ExperimentError, match="n_iters must be odd or inf; got 2"):
        AuthorsTask(replace(made.config, n_iters=2), 0, load_opinions())


def test_observing_does_not_change_the_model(made):
    model = made.model()
    assert len(made.observe(model)["layers"]) == 2
    attention = [layer for layer in model.modules() if isinstance(layer, SelfAttention)]
    assert {type(layer) for layer in attention} == {DetachedAttention}


def test_only_one_preset_does_so():
    assert [name for name, preset in figure4.FIGURE4.presets.items() if preset.config.authors] == ["authors"]
    smoke = figure4.FIGURE4.presets["smoke"]
    assert type(figure4.task(smoke, smoke.arms[0], 0, None)) is TextTask
