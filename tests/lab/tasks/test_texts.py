"""The task of texts: batches with masks, a vocabulary from the training texts only, evaluation of all test texts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from sinkformers.lab.artefacts.figure4 import OPINIONS
from sinkformers.lab.data import Texts, TextSet
from sinkformers.lab.tasks import texts as module
from sinkformers.lab.tasks.texts import TextTask
from sinkformers.lab.tasks.vocabulary import Vocabulary
from sinkformers.lab.workbench.task import HasFiles, Recipe

WORDS = ["Alpha", "beta", "gamma<br />", "delta", "epsilon zeta", "eta"]


def text_set(n_train=53, n_test=29):
    generator = torch.Generator().manual_seed(5)

    def part(n, words):
        picks = [torch.randint(0, 6, (1 + k % 11,), generator=generator).tolist() for k in range(n)]
        return Texts(
            [" ".join(words[pick] for pick in each) for each in picks], torch.randint(0, 3, (n,), generator=generator)
        )

    return TextSet(
        part(n_train, WORDS), part(n_test, [word.replace("ta", "x") for word in WORDS]), ("a", "b", "c"), "x"
    )


def task(seed=0, **settings):
    config = replace(OPINIONS, recipe=Recipe(epochs=1, batch=10, rate=0.1), dropout=0.0, vocabulary=300)
    return TextTask(config.with_settings(settings), seed, text_set())


def test_every_text_is_seen_once_per_epoch_in_a_new_order():
    made = task()
    first, second = (torch.cat(list(made.batches(epoch))) for epoch in (1, 2))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(53))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.cat(list(made.batches(1))))
    assert not torch.equal(first, torch.cat(list(task(seed=1).batches(1))))


def test_the_vocabulary_is_learned_from_the_training_texts_and_saved():
    made = task()
    texts = [text.replace("<br />", "\n") for text in made.texts.train.texts]
    assert made.reader.vocabulary.sha256 == Vocabulary.learned(texts, 300).sha256 == made.facts["data"]["vocabulary"]
    assert isinstance(made, HasFiles)
    kept = Vocabulary.of_json(made.files()["vocabulary.json"].decode())
    assert kept.encode(["beta"]) == made.reader.vocabulary.encode(["beta"])


def test_texts_are_truncated_and_optionally_in_lower_case():
    made = task(length=7, lower=True)
    lowered = [text.lower().replace("<br />", "\n") for text in made.texts.test.texts]
    expected = [numbers[:7] for numbers in made.reader.vocabulary.encode(lowered)]
    ids, mask = made.test.padded(torch.arange(29))
    assert [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)] == expected


@pytest.mark.parametrize("at_a_time", [16, 16_384])
def test_the_test_set_is_evaluated_in_full_text_by_text(monkeypatch, at_a_time):
    monkeypatch.setattr(module, "AT_A_TIME", at_a_time)
    AcceleratorState._reset_state(reset_partial_state=True)
    made = task(n_iters=3)
    model, labels = made.model().eval(), made.texts.test.labels
    read = [text.replace("<br />", "\n") for text in made.texts.test.texts]
    logits = torch.cat([model(torch.tensor([numbers[:32]])) for numbers in made.reader.vocabulary.encode(read)])
    found = made.evaluate(model, Accelerator(cpu=True))
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == labels).double().mean().item())
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_attention_is_measured_without_padding():
    made = task(n_iters=21)
    seen = made.observe(made.model())
    assert len(seen["layers"]) == 2
    assert seen["columns"]["gap"] < 1e-3


def test_a_loss_is_the_sum_over_its_examples():
    made = task(n_iters=3)
    model = made.model()
    examples = torch.tensor([3, 50, 17])
    loss, sums = made.losses(model, examples)
    alone = [made.losses(model, examples[k : k + 1])[0].item() for k in range(3)]
    assert loss.item() == pytest.approx(sum(alone), rel=1e-5)
    assert 0 <= sums["accuracy"] <= made.weight(examples) == 3
